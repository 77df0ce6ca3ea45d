"""Greedy output through every kind of tree and draft is token-identical to plain vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine import harness
from tests.engine.conftest import EOS_TOKEN_ID, VOCAB_SIZE


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine()


@pytest.fixture(scope="module")
def medusa(make_engine: Any, random_heads: Path) -> Any:
    return make_engine(speculative_config=harness.speculation(random_heads))


@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("shape", harness.TREES)
def test_every_tree_and_draft(plain: Any, medusa: Any, shape: str, draft: str) -> None:
    topology = harness.TREES[shape]
    requests = harness.prompts(6, lengths=[2, 9, 31, 33, 70], vocab_size=VOCAB_SIZE)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    drafter = harness.plant(medusa, [topology], VOCAB_SIZE, harness.HIT_RATES[draft])
    harness.teach(drafter, plain, requests, params)
    assert harness.answers(medusa, requests, params) == harness.answers(plain, requests, params)
    harness.assert_draft_did_its_part(drafter, topology)


def test_trees_of_different_shapes_in_one_batch(plain: Any, medusa: Any) -> None:
    requests = harness.prompts(16, lengths=[1, 5, 32, 64, 90], vocab_size=VOCAB_SIZE, seed=1)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    drafter = harness.plant(medusa, list(harness.TREES.values()), VOCAB_SIZE, 0.7, seed=2)
    harness.teach(drafter, plain, requests, params)
    assert harness.answers(medusa, requests, params) == harness.answers(plain, requests, params)
    harness.assert_draft_did_its_part(drafter, harness.BUSHY)


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_max_tokens_cuts_inside_an_accepted_path(plain: Any, medusa: Any, max_tokens: int) -> None:
    requests = harness.prompts(3, lengths=[4, 20], vocab_size=VOCAB_SIZE)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    drafter = harness.plant(medusa, [harness.DEEP], VOCAB_SIZE, 1.0)
    harness.teach(drafter, plain, requests, params)
    assert harness.answers(medusa, requests, params) == harness.answers(plain, requests, params)


@pytest.mark.parametrize("offset", range(1, 9))
def test_stop_token_inside_an_accepted_path(plain: Any, medusa: Any, offset: int) -> None:
    requests = harness.prompts(4, lengths=[3, 17], vocab_size=VOCAB_SIZE, seed=4)
    free = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    stops = [known[0].token_ids[offset] for known in harness.answers(plain, requests, free)]
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=stops, ignore_eos=True)
    drafter = harness.plant(medusa, [harness.DEEP, harness.CHAIN], VOCAB_SIZE, 1.0)
    harness.teach(drafter, plain, requests, params)
    expected = harness.answers(plain, requests, params)
    assert any(known[0].finish_reason == "stop" for known in expected)
    assert harness.answers(medusa, requests, params) == expected


@pytest.mark.parametrize("offset", range(1, 7))
def test_eos_inside_an_accepted_path(plain: Any, medusa: Any, offset: int) -> None:
    """EOS is made likely by a bias that other tokens of the text do not have."""
    requests = harness.prompts(4, lengths=[3, 17], vocab_size=VOCAB_SIZE, seed=offset)
    params = SamplingParams(
        temperature=0,
        max_tokens=24,
        min_tokens=offset,
        logit_bias={EOS_TOKEN_ID: 100.0},
    )
    drafter = harness.plant(medusa, [harness.DEEP], VOCAB_SIZE, 1.0)
    # Plant EOS where plain decoding emits it, and what could follow.
    for request, known in zip(requests, harness.answers(plain, requests, params), strict=True):
        drafter.learn(request, [*known[0].token_ids, 7, 8, 9, 10])
        assert known[0].token_ids[-1] == EOS_TOKEN_ID
    assert harness.answers(medusa, requests, params) == harness.answers(plain, requests, params)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_inside_an_accepted_path(plain: Any, medusa: Any, include: bool) -> None:
    # Only printable single-byte tokens, so that every token is one character of text.
    letters = list(range(33, 120))
    requests = harness.prompts(4, lengths=[3, 17], vocab_size=VOCAB_SIZE, seed=6)
    free = SamplingParams(temperature=0, max_tokens=24, allowed_token_ids=letters)
    texts = [known[0].text for known in harness.answers(plain, requests, free)]
    for start in range(1, 8):
        stops = [text[start : start + 2] for text in texts]
        params = SamplingParams(
            temperature=0,
            max_tokens=24,
            allowed_token_ids=letters,
            stop=stops,
            include_stop_str_in_output=include,
        )
        drafter = harness.plant(medusa, [harness.DEEP, harness.BUSHY], VOCAB_SIZE, 1.0)
        harness.teach(drafter, plain, requests, params)
        expected = harness.answers(plain, requests, params)
        assert any(known[0].finish_reason == "stop" for known in expected)
        assert harness.answers(medusa, requests, params) == expected


@pytest.mark.parametrize("draft", harness.HIT_RATES)
def test_last_positions_before_max_model_len(plain: Any, medusa: Any, draft: str) -> None:
    """Near the end the scheduler grants ever smaller prefixes of the tree."""
    requests = [
        prompt[: 256 - room]
        for room, prompt in zip(
            range(1, 13), harness.prompts(12, [256], VOCAB_SIZE, seed=8), strict=True
        )
    ]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    drafter = harness.plant(
        medusa, [harness.BUSHY, harness.DEEP], VOCAB_SIZE, harness.HIT_RATES[draft]
    )
    for request, known in zip(requests, harness.answers(plain, requests, params), strict=True):
        drafter.learn(request, [*known[0].token_ids, 1, 2, 3])
    assert harness.answers(medusa, requests, params) == harness.answers(plain, requests, params)


def test_token_zero_as_the_true_next_token_at_a_leaf(plain: Any, medusa: Any) -> None:
    """Padding a short path with token 0 must never count as accepting token 0."""
    requests = harness.prompts(6, lengths=[3, 17], vocab_size=VOCAB_SIZE, seed=9)
    params = SamplingParams(temperature=0, max_tokens=32, allowed_token_ids=[0, 3, 5, 11])
    expected = harness.answers(plain, requests, params)
    assert sum(known[0].token_ids.count(0) for known in expected) > 10
    for topology in (harness.SINGLE, harness.WIDE, harness.BUSHY):
        drafter = harness.plant(medusa, [topology], VOCAB_SIZE, 1.0)
        harness.teach(drafter, plain, requests, params)
        assert harness.answers(medusa, requests, params) == expected


def test_the_real_heads_path(plain: Any, medusa: Any) -> None:
    """Random heads over the configured tree: everything but acceptance, without a planted draft."""
    from medusa_plugin.draft import TreeDrafter

    runner = harness.runner_of(medusa)
    runner.drafter.load_model(runner.model)
    assert isinstance(runner.medusa_drafter, TreeDrafter)
    requests = harness.prompts(5, lengths=[3, 17, 40], vocab_size=VOCAB_SIZE, seed=10)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    assert harness.answers(medusa, requests, params) == harness.answers(plain, requests, params)
