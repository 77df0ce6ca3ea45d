"""Look-up branches: chances follow what was right, texts follow the requests."""

from __future__ import annotations

import numpy as np
import pytest

from medusa_plugin.branches import LookupSource
from medusa_plugin.lookup import MAX_MATCH_LENGTH, PRIOR_HIT_RATE

PATTERN = [5, 6, 7, 8, 9]


def row(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_the_branch_continues_the_text_with_the_prior_chances() -> None:
    source = LookupSource()
    source.advance(["a", "b"], [row([*PATTERN, 5]), row([1, 2, 3])], [row([6]), row([4])])
    branches = source.propose(["a", "b"], 4)
    assert branches is not None
    assert branches.tokens[0].tolist() == [7, 8, 9, 5]
    agreeing = 2  # "5 6" before the branch
    assert branches.probs[0] == pytest.approx([PRIOR_HIT_RATE[agreeing + j] for j in range(4)])
    assert branches.tokens[1].tolist() == [-1] * 4 and not branches.probs[1].any()


def test_nothing_repeats_nothing_is_proposed() -> None:
    source = LookupSource()
    source.advance(["a"], [row([1, 2, 3])], [row([4])])
    assert source.propose(["a"], 4) is None


def run(source: LookupSource, request: str, right: bool, steps: int) -> float:
    """Step a request along a repeating text, or one that always leaves it; the last chance."""
    text = [*PATTERN, *PATTERN[:2]]
    chance = 0.0
    for _ in range(steps):
        # Wrong is a fresh token, then the start of the pattern again.
        wrong = [1000 + len(text), *PATTERN[:2]]
        new = [PATTERN[len(text) % len(PATTERN)]] if right else wrong
        source.advance([request], [row(text)], [row(new)])
        text += new
        branches = source.propose([request], 3)
        assert branches is not None
        chance = float(branches.probs[0, 0])
    return chance


def test_a_request_that_leaves_its_text_is_no_longer_trusted() -> None:
    source = LookupSource()
    assert run(source, "leaves", right=False, steps=40) < 0.3 * PRIOR_HIT_RATE[2]
    assert run(source, "repeats", right=True, steps=40) > 0.9


def test_hit_rates_are_learnt_over_all_requests() -> None:
    source = LookupSource()
    before = source.hit_rate(MAX_MATCH_LENGTH)
    for i in range(10):
        run(source, f"r{i}", right=True, steps=60)
    assert source.hit_rate(MAX_MATCH_LENGTH) > before
    for i in range(10):
        run(source, f"wrong{i}", right=False, steps=60)
    assert source.hit_rate(2) < 0.5 * PRIOR_HIT_RATE[2]


def test_the_index_catches_up_with_steps_it_did_not_see() -> None:
    """A request that skipped a step (preemption) comes back with a longer text."""
    source = LookupSource()
    source.advance(["a"], [row([1, 2, 3])], [row([4])])
    source.advance(["a"], [row([1, 2, 3, 4, 9, 9, 1])], [row([2])])
    branches = source.propose(["a"], 2)
    assert branches is not None and branches.tokens[0].tolist() == [3, 4]


def test_ended_requests_are_forgotten() -> None:
    source = LookupSource()
    source.advance(["a", "b"], [row([1]), row([2])], [row([1]), row([2])])
    source.forget(["a", "unknown"])
    assert set(source._requests) == {"b"}
