"""The embedded model with the shipped heads: real acceptance, and plain vLLM's own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from medusa_plugin.commands.demo import QUESTIONS
from medusa_plugin.divergence import compare
from medusa_plugin.embedded import ensure_embedded_model
from medusa_plugin.vllm_glue.generations import GenerateRequest, record_run

CHATS = [[{"role": "user", "content": question}] for (question,) in QUESTIONS]


# Sizes by cost depend on the machine; these show what the heads can do.
FIVE_NODES = {"num_speculative_tokens": 5, "sizes": "fixed"}


def engines(dtype: str, **medusa: Any) -> Iterator[tuple[Any, Any]]:
    """Plain and Medusa engines with equal settings."""
    made = []
    for options in ({}, {"speculative_config": {"method": "medusa", **medusa}}):
        made.append(
            LLM(
                model=str(ensure_embedded_model(progress=False)),
                dtype=dtype,
                enforce_eager=True,
                max_model_len=512,
                max_num_seqs=4,
                disable_log_stats=False,
                **options,
            )
        )
    yield made[0], made[1]
    for engine in made:
        engine.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def float32() -> Iterator[tuple[Any, Any]]:
    yield from engines("float32", **FIVE_NODES)


@pytest.fixture(scope="module")
def bfloat16() -> Iterator[tuple[Any, Any]]:
    yield from engines("bfloat16")


def counter(engine: Any, name: str) -> int:
    return sum(m.value for m in engine.get_metrics() if m.name == f"vllm:spec_decode_{name}")


def test_float32_output_is_token_identical(float32: tuple[Any, Any]) -> None:
    plain, medusa = float32
    params = SamplingParams(temperature=0, max_tokens=48)
    expected = [o.outputs[0] for o in plain.chat(CHATS, params, use_tqdm=False)]
    found = [o.outputs[0] for o in medusa.chat(CHATS, params, use_tqdm=False)]
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert [o.text for o in found] == [o.text for o in expected]
    drafts = counter(medusa, "num_drafts")
    assert drafts > 0
    assert 1 + counter(medusa, "num_accepted_tokens") / drafts > 1.25, "the heads hardly help"


def test_float32_seeded_samples_are_token_identical(float32: tuple[Any, Any]) -> None:
    plain, medusa = float32
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=40)
    expected = [o.outputs[0].token_ids for o in plain.chat(CHATS[:2], params, use_tqdm=False)]
    found = [o.outputs[0].token_ids for o in medusa.chat(CHATS[:2], params, use_tqdm=False)]
    assert found == expected


def test_bfloat16_parts_only_where_rounding_decides(bfloat16: tuple[Any, Any]) -> None:
    """Where the runs first differ, both sides rank the two tokens within rounding."""
    runs = [
        record_run(engine, GenerateRequest(name, tuple(question for (question,) in QUESTIONS), 48))
        for name, engine in zip(("plain", "medusa"), bfloat16, strict=True)
    ]
    report = compare(*runs)
    assert not report.faults, [parting for parting in report.partings if parting is not None]
