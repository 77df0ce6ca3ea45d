"""Structured output under Medusa: these requests get chains, other requests keep their trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE

CONSTRAINTS = {
    "json": {
        "json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    },
    "regex": {"regex": r"[a-f]{3}-[0-9]{4}"},
    "choice": {"choice": ["alpha", "alphabet", "beta"]},
}


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine()


@pytest.fixture(scope="module")
def medusa(make_engine: Any, random_heads: Path) -> Any:
    return make_engine(
        speculative_config={
            "method": "medusa",
            "model": str(random_heads),
            "num_speculative_tokens": harness.MAX_NODES,
        }
    )


@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_constrained_output_equals_plain(plain: Any, medusa: Any, kind: str, draft: str) -> None:
    requests = harness.prompts(3, lengths=[4, 20], vocab_size=VOCAB_SIZE, seed=1)
    params = SamplingParams(
        temperature=0,
        max_tokens=24,
        structured_outputs=StructuredOutputsParams(**CONSTRAINTS[kind]),
    )
    expected = harness.answers(plain, requests, params)
    drafter = harness.plant(medusa, [harness.BUSHY], VOCAB_SIZE, harness.HIT_RATES[draft])
    for request, known in zip(requests, expected, strict=True):
        drafter.learn(request, known[0].token_ids)
    assert harness.answers(medusa, requests, params) == expected
    assert drafter.branching_steps == 0, "a structured-output request got a tree"
    if draft == "oracle":
        assert sum(drafter.accepted) > 0


def test_constrained_and_free_requests_in_one_batch(plain: Any, medusa: Any) -> None:
    requests = harness.prompts(4, lengths=[4, 20], vocab_size=VOCAB_SIZE, seed=2)
    free = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    bound = SamplingParams(
        temperature=0,
        max_tokens=24,
        structured_outputs=StructuredOutputsParams(**CONSTRAINTS["regex"]),
    )
    params = [free, bound, free, bound]
    expected = harness.answers(plain, requests, params)
    drafter = harness.plant(medusa, [harness.BUSHY], VOCAB_SIZE, 1.0)
    for request, known in zip(requests, expected, strict=True):
        drafter.learn(request, known[0].token_ids)
    assert harness.answers(medusa, requests, params) == expected
    assert drafter.branching_steps > 0
