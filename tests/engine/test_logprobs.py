"""Logprobs of accepted, rejected and bonus tokens are those of plain decoding, in every mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.sample.sampler import Sampler

from tests.engine import harness
from tests.engine.conftest import EOS_TOKEN_ID, VOCAB_SIZE

MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine(max_logprobs=VOCAB_SIZE)


@pytest.fixture(scope="module")
def medusa(make_engine: Any, random_heads: Path) -> Any:
    return make_engine(
        max_logprobs=VOCAB_SIZE,
        speculative_config=harness.speculation(random_heads),
    )


def outputs(engine: Any, requests: Sequence[list[int]], params: Any) -> list[Any]:
    batch = [{"prompt_token_ids": list(request)} for request in requests]
    return list(engine.generate(batch, params, use_tqdm=False))


def assert_same_logprobs(ours: Any, theirs: Any) -> None:
    """Positions, tokens, order and ranks are equal, values nearly so."""
    assert (ours is None) == (theirs is None)
    if theirs is None:
        return
    assert len(ours) == len(theirs)
    for mine, known in zip(ours, theirs, strict=True):
        assert (mine is None) == (known is None)
        if known is None:  # the first token of a prompt
            continue
        assert list(mine) == list(known)
        for token, entry in known.items():
            assert mine[token].rank == entry.rank
            assert mine[token].decoded_token == entry.decoded_token
            assert mine[token].logprob == pytest.approx(entry.logprob, abs=TOLERANCE)


def compare(
    plain: Any, medusa: Any, requests: Sequence[list[int]], params: Any, hit_rate: float
) -> harness.PlantedDrafter:
    """Run `requests` on both engines, with the plain engine's own answers as what is planted."""
    expected = outputs(plain, requests, params)
    drafter = harness.plant(medusa, [harness.BUSHY, harness.DEEP], VOCAB_SIZE, hit_rate)
    for request, output in zip(requests, expected, strict=True):
        drafter.learn(request, [*output.outputs[0].token_ids, 7, 8, 9, 10])
    for ours, theirs in zip(outputs(medusa, requests, params), expected, strict=True):
        for mine, known in zip(ours.outputs, theirs.outputs, strict=True):
            assert mine.token_ids == known.token_ids and mine.text == known.text
            assert_same_logprobs(mine.logprobs, known.logprobs)
            assert mine.cumulative_logprob == pytest.approx(known.cumulative_logprob, abs=1e-3)
        assert_same_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)
    if hit_rate == 0.0:
        assert drafter.accepted and not sum(drafter.accepted)
    else:
        assert sum(drafter.accepted) > 0
    return drafter


@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(
    plain: Any, medusa: Any, monkeypatch: pytest.MonkeyPatch, mode: Any, draft: str
) -> None:
    for engine in (plain, medusa):
        monkeypatch.setattr(harness.runner_of(engine), "sampler", Sampler(logprobs_mode=mode))
    requests = harness.prompts(4, lengths=[3, 18], vocab_size=VOCAB_SIZE, seed=2)
    for temperature in (0.0, 0.9):
        # What processors and the sampler change, and what they do not.
        params = SamplingParams(
            temperature=temperature,
            top_k=20,
            seed=5,
            repetition_penalty=1.2,
            logit_bias={9: 2.0},
            max_tokens=14,
            logprobs=4,
            prompt_logprobs=2,
        )
        compare(plain, medusa, requests, params, harness.HIT_RATES[draft])


@pytest.mark.parametrize("logprobs", [0, 1, VOCAB_SIZE, -1])
def test_every_count(plain: Any, medusa: Any, logprobs: int) -> None:
    requests = harness.prompts(3, lengths=[2, 33], vocab_size=VOCAB_SIZE, seed=3)
    params = SamplingParams(
        temperature=0, max_tokens=10, ignore_eos=True, logprobs=logprobs, prompt_logprobs=logprobs
    )
    compare(plain, medusa, requests, params, 1.0)


def test_each_request_has_its_own_count(plain: Any, medusa: Any) -> None:
    requests = harness.prompts(6, lengths=[2, 33], vocab_size=VOCAB_SIZE, seed=4)
    params = [
        SamplingParams(temperature=0, max_tokens=12 + i, ignore_eos=True, logprobs=logprobs)
        for i, logprobs in enumerate([None, 0, 5, None, 2, 9])
    ]
    expected = outputs(plain, requests, params)
    drafter = harness.plant(medusa, [harness.BUSHY, harness.CHAIN], VOCAB_SIZE, 0.7)
    for request, output in zip(requests, expected, strict=True):
        drafter.learn(request, output.outputs[0].token_ids)
    for ours, theirs in zip(outputs(medusa, requests, params), expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert_same_logprobs(ours.outputs[0].logprobs, theirs.outputs[0].logprobs)
    assert sum(drafter.accepted) > 0


def test_chosen_tokens_only(plain: Any, medusa: Any) -> None:
    """`logprob_token_ids` asks for the logprobs of given tokens in place of the best."""
    requests = harness.prompts(3, lengths=[5, 20], vocab_size=VOCAB_SIZE, seed=5)
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprob_token_ids=[4, 250, 17]
    )
    compare(plain, medusa, requests, params, 0.8)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("offset", range(1, 7))
def test_stop_string_inside_an_accepted_path(
    plain: Any, medusa: Any, offset: int, include: bool
) -> None:
    """What lies behind the stop string in the same step has neither token ids nor logprobs."""
    letters = list(range(33, 120))
    requests = harness.prompts(3, lengths=[3, 17], vocab_size=VOCAB_SIZE, seed=6)
    free = SamplingParams(temperature=0, max_tokens=20, allowed_token_ids=letters)
    texts = [answer[0].text for answer in harness.answers(plain, requests, free)]
    params = SamplingParams(
        temperature=0,
        max_tokens=20,
        allowed_token_ids=letters,
        stop=[text[offset : offset + 2] for text in texts],
        include_stop_str_in_output=include,
        logprobs=2,
    )
    compare(plain, medusa, requests, params, 1.0)


def test_eos_inside_an_accepted_path(plain: Any, medusa: Any) -> None:
    requests = harness.prompts(4, lengths=[3, 17], vocab_size=VOCAB_SIZE, seed=7)
    for min_tokens in range(1, 9):
        params = SamplingParams(
            temperature=0,
            max_tokens=24,
            min_tokens=min_tokens,
            logit_bias={EOS_TOKEN_ID: 100.0},
            logprobs=1,
        )
        compare(plain, medusa, requests, params, 1.0)


def test_a_drafted_eos_that_the_target_refuses_ends_nothing(plain: Any, medusa: Any) -> None:
    """EOS stands among the wrong siblings of every level, the right token beside it."""
    requests = harness.prompts(4, lengths=[3, 17], vocab_size=VOCAB_SIZE, seed=8)
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias={EOS_TOKEN_ID: -100.0})
    expected = harness.answers(plain, requests, params)
    drafter = harness.plant(medusa, [harness.WIDE, harness.BUSHY], VOCAB_SIZE, 1.0)
    drafter.alphabet = [EOS_TOKEN_ID]
    harness.teach(drafter, plain, requests, params)
    assert harness.answers(medusa, requests, params) == expected
    assert all(len(known[0].token_ids) == 20 for known in expected)
    assert sum(drafter.accepted) > 0


@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_a_strong_bias_against_or_for_what_is_drafted(plain: Any, medusa: Any, bias: float) -> None:
    requests = harness.prompts(3, lengths=[3, 17], vocab_size=VOCAB_SIZE, seed=9)
    free = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    drafter = harness.plant(medusa, [harness.DEEP, harness.BUSHY], VOCAB_SIZE, 1.0)
    known = harness.answers(plain, requests, free)
    for request, answer in zip(requests, known, strict=True):
        drafter.learn(request, answer[0].token_ids)  # what would come without the bias
    biased = known[0][0].token_ids[2]
    params = free.clone()
    params.logit_bias = {biased: bias}
    answers = harness.answers(medusa, requests, params)
    assert answers == harness.answers(plain, requests, params)
    for answer in answers:
        tokens = answer[0].token_ids
        assert set(tokens) == {biased} if bias > 0 else biased not in tokens
