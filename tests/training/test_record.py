"""Records of answers: where loops begin, and which steps belong to an answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.heads.base import Candidates
from medusa_plugin.request_options import RequestOptions
from medusa_plugin.training.record import (
    MIN_LOOP_REPEATS,
    MIN_LOOP_TOKENS,
    RecordingDrafter,
    loop_start,
)
from tests.test_request_limits import SureHeads, request


class EchoHeads(SureHeads):
    """Best candidate of head h: the token before, plus 1 + h."""

    def propose(self, hidden: torch.Tensor, token_ids: torch.Tensor, top_k: int) -> Candidates:
        sure = super().propose(hidden, token_ids, top_k)
        ids = token_ids[:, None, None] + 1 + torch.arange(self.num_heads)[:, None] + sure.token_ids
        return Candidates(ids, sure.logits, sure.all_logits)


def plain_loop_start(tokens: list[int]) -> int:
    """The least end of a first occurrence after which the text goes on repeating long enough."""
    n = len(tokens)
    for end in range(1, n):
        for period in range(1, end + 1):
            last = end
            while last < n and tokens[last] == tokens[last - period]:
                last += 1
            length = last - (end - period)
            if length >= MIN_LOOP_REPEATS * period and length >= MIN_LOOP_TOKENS:
                return end
    return n


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], 0),
        ([1, 2, 3], 3),
        ([7] * 11, 11),
        ([7] * 12, 1),
        ([1, 2, *[7] * 12, 3], 3),
        ([1, *[2, 3, 4] * 4], 4),
        ([*[2, 3, 4] * 3], 9),
        ([1, *list(range(10, 16)) * 3, 1], 7),
        ([1, *list(range(10, 16)) * 2, 1], 14),
    ],
)
def test_the_first_occurrence_of_a_loop_is_text(tokens: list[int], expected: int) -> None:
    assert loop_start(np.array(tokens, np.int64)) == expected


def test_loops_are_found_as_by_looking_everywhere() -> None:
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(300):
        piece = rng.integers(0, 3, int(rng.integers(1, 7))).tolist()
        text = rng.integers(0, 3, int(rng.integers(0, 8))).tolist()
        tokens = [*text, *piece * int(rng.integers(1, 7)), *rng.integers(0, 3, 3).tolist()]
        expected = plain_loop_start(tokens)
        found += expected < len(tokens)
        assert loop_start(np.array(tokens)) == expected, tokens
    assert found > 50


@pytest.mark.parametrize(("steps", "tokens", "kept"), [(4, 4, 4), (5, 4, 4), (3, 4, 3)])
def test_an_answer_has_the_steps_of_its_tokens(steps: int, tokens: int, kept: int) -> None:
    drafter = RecordingDrafter(EchoHeads(), num_nodes=4)
    drafter.record(2)
    drafter._recorded["a"] = [torch.zeros(8)] * steps
    answer = drafter.take("a", range(100, 100 + tokens))
    assert answer.tokens.tolist() == list(range(100, 100 + kept))
    assert answer.candidates[:, 0, 0].tolist() == list(range(101, 101 + kept))
    assert answer.log_probs.shape == (kept, 3, 2)
    cut = answer.cut(2)
    assert len(cut.tokens) == len(cut.candidates) == len(cut.log_probs) == 2


def test_every_token_is_a_root_once_and_nothing_is_drafted() -> None:
    drafter = RecordingDrafter(EchoHeads(), num_nodes=4)
    drafter.record(50)  # more than there are
    steps: list[dict[int, int]] = [{1: 10, 2: 20}, {2: 21}, {2: 22, 1: 11}]
    for step in steps:
        requests = [request(number, RequestOptions()) for number in step]
        paths = [AcceptedPath((), (token,)) for token in step.values()]
        trees = drafter.draft(requests, paths, torch.zeros(len(step), 8))
        assert [tree.num_nodes for tree in trees] == [0] * len(step)
    drafter.forget(["1", "2"])  # the host does when a request ends, before it is taken
    second, first = drafter.take("2", [20, 21, 22]), drafter.take("1", [10, 11])
    for answer in (first, second):
        expected = answer.tokens[:, None] + 1 + np.arange(3)
        assert answer.candidates[:, :, 0].tolist() == expected.tolist()
        assert answer.candidates.shape == answer.log_probs.shape == (len(answer.tokens), 3, 16)
        assert np.exp(answer.log_probs).sum(2) == pytest.approx(1), "of all the vocabulary"
    drafter.record(2)
    with pytest.raises(KeyError):
        drafter.take("1", [10])
