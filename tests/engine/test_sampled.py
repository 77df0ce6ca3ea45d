"""Sampled output: seeded text equals plain decoding; unseeded text follows the target's law."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from vllm import SamplingParams

from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine(max_num_seqs=64)


@pytest.fixture(scope="module")
def medusa(make_engine: Any, random_heads: Path) -> Any:
    return make_engine(
        max_num_seqs=64,
        speculative_config=harness.speculation(random_heads),
    )


SEEDED = {
    "temperature": {"temperature": 1.0},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "logit_bias": {"temperature": 0.8, "logit_bias": {5: 3.0, 9: 4.0}},
    "repetition": {"temperature": 0.7, "repetition_penalty": 1.4},
    "presence_frequency": {
        "temperature": 0.7,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.6,
    },
    "bad_words": {"temperature": 0.7, "bad_words": ["a", "b!"]},
    "allowed": {"temperature": 1.0, "allowed_token_ids": [0, 1, 2, 3, 4]},
    "min_tokens": {"temperature": 1.0, "min_tokens": 7, "logit_bias": {256: 8.0}},
    "greedy_penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
}


@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("name", SEEDED)
def test_seeded_text_equals_plain(plain: Any, medusa: Any, name: str, draft: str) -> None:
    requests = harness.prompts(4, lengths=[3, 18, 40], vocab_size=VOCAB_SIZE, seed=1)
    params = SamplingParams(max_tokens=24, seed=77, **SEEDED[name])
    expected = harness.answers(plain, requests, params)
    drafter = harness.plant(
        medusa, [harness.BUSHY, harness.DEEP], VOCAB_SIZE, harness.HIT_RATES[draft]
    )
    for request, known in zip(requests, expected, strict=True):
        drafter.learn(request, known[0].token_ids)
    assert harness.answers(medusa, requests, params) == expected
    if draft == "oracle":
        assert sum(drafter.accepted) > len(requests)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs(plain: Any, medusa: Any, temperature: float) -> None:
    requests = harness.prompts(4, lengths=[3, 18], vocab_size=VOCAB_SIZE, seed=2)
    params = SamplingParams(
        temperature=temperature, seed=5, max_tokens=20, logprobs=3, prompt_logprobs=2
    )
    batch = [{"prompt_token_ids": request} for request in requests]
    expected = plain.generate(batch, params, use_tqdm=False)
    drafter = harness.plant(medusa, [harness.BUSHY], VOCAB_SIZE, 0.8)
    for request, output in zip(requests, expected, strict=True):
        drafter.learn(request, output.outputs[0].token_ids)
    for ours, theirs in zip(medusa.generate(batch, params, use_tqdm=False), expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert len(ours.outputs[0].logprobs) == len(theirs.outputs[0].logprobs)
        for mine, known in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert list(mine) == list(known)
            for token in known:
                assert mine[token].rank == known[token].rank
                assert mine[token].logprob == pytest.approx(known[token].logprob, abs=1e-4)
        assert ours.prompt_logprobs[1:] is not None
        for mine, known in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
            assert list(mine) == list(known)
    assert sum(drafter.accepted) > 0


def test_parallel_samples_with_seed(plain: Any, medusa: Any) -> None:
    requests = harness.prompts(2, lengths=[7, 40], vocab_size=VOCAB_SIZE, seed=3)
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=16)
    expected = harness.answers(plain, requests, params)
    drafter = harness.plant(medusa, [harness.BUSHY], VOCAB_SIZE, 1.0)
    for request, known in zip(requests, expected, strict=True):
        drafter.learn(request, known[1].token_ids)
    assert harness.answers(medusa, requests, params) == expected
    assert sum(drafter.accepted) > 0


def test_seeded_request_whose_prompt_is_prefilled_in_chunks(make_engine: Any, medusa: Any) -> None:
    """A discarded prefill chunk draws nothing: the text is that of an unchunked prefill.

    vLLM 0.32 itself fails here on CPU, where a generator cannot be rewound.
    """
    request = harness.prompts(1, lengths=[120], vocab_size=VOCAB_SIZE, seed=4)
    params = SamplingParams(temperature=1.0, seed=21, max_tokens=16)
    harness.plant(medusa, [harness.BUSHY], VOCAB_SIZE, 0.0)
    expected = harness.answers(medusa, request, params)
    config = medusa.llm_engine.vllm_config
    chunked = make_engine(
        max_num_seqs=2,
        max_num_batched_tokens=48,
        enable_chunked_prefill=True,
        speculative_config={
            "method": "medusa",
            "model": config.additional_config["medusa"]["heads"],
        },
    )
    harness.plant(chunked, [harness.CHAIN], VOCAB_SIZE, 0.0)
    assert harness.answers(chunked, request, params) == expected


def test_min_tokens_of_a_request_prefilled_beside_a_walk(
    make_engine: Any, plain: Any, medusa: Any
) -> None:
    """The discarded draw of a prefill chunk is no output: min_tokens counts from zero after it."""
    heads = medusa.llm_engine.vllm_config.additional_config["medusa"]["heads"]
    chunked = make_engine(
        max_num_batched_tokens=32,
        max_num_seqs=4,
        enable_prefix_caching=False,
        speculative_config={"method": "medusa", "model": heads},
    )
    requests = [[1, 2, 3], [5] * 100]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=0, max_tokens=5, min_tokens=1, logit_bias={256: 100.0}),
    ]
    expected = harness.answers(plain, requests, params)
    drafter = harness.plant(chunked, [harness.TREES["single"]], VOCAB_SIZE, 1.0)
    for request, known in zip(requests, expected, strict=True):
        drafter.learn(request, known[0].token_ids)
    assert harness.answers(chunked, requests, params) == expected
    assert sum(drafter.accepted) > 0


ALPHABET = [10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize("shape", ["wide", "bushy", "deep"])
def test_law_of_two_steps(plain: Any, medusa: Any, shape: str) -> None:
    """Joint law of the first three sampled tokens over six values, by chi-square.

    The trees carry tokens of the same six values, so that paths are accepted and rejected in
    all ways; any bias of acceptance moves the joint law.
    """
    prompt = [5, 6, 7]
    params = SamplingParams(
        temperature=1.5, max_tokens=3, ignore_eos=True, allowed_token_ids=ALPHABET, n=48
    )
    drafter = harness.plant(medusa, [harness.TREES[shape]], VOCAB_SIZE, 1.0)
    drafter.alphabet = ALPHABET
    counts = [Counter(), Counter()]
    for round_number in range(60):
        for engine, counter in zip((plain, medusa), counts, strict=True):
            if engine is medusa and round_number == 0:
                drafter.learn(prompt, [ALPHABET[0], ALPHABET[3], ALPHABET[1]])
            for answer in harness.answers(engine, [prompt], params)[0]:
                counter[answer.token_ids] += 1
    assert sum(drafter.accepted) > 200
    outcomes = [o for o in set(counts[0]) | set(counts[1]) if counts[0][o] + counts[1][o] >= 10]
    rare = [sum(c[o] for o in c if o not in set(outcomes)) for c in counts]
    table = [[c[o] for o in outcomes] + [rare[i] + 1] for i, c in enumerate(counts)]
    assert len(outcomes) > 20
    assert stats.chi2_contingency(table).pvalue > 1e-3
