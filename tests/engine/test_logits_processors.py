"""Custom logits processors see, at every row of a walk, what they see in plain decoding."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from tests.engine import harness
from tests.engine.conftest import EOS_TOKEN_ID, MARKS, VOCAB_SIZE
from tests.engine.test_stress import assert_equal, random_arrivals
from tests.engine.test_stress import run as run_arrivals

START, END_MARK = next(iter(MARKS)), "</think>"


class NoRepeat(LogitsProcessor):
    """Bans the last output token and favours one that depends on the output's length."""

    # Named as in a built-in processor, where an empty dict means that there is nothing to do.
    biases: dict[int, Any] = {}  # noqa: RUF012

    def __init__(self, *args: Any) -> None:
        self.outputs: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.outputs.pop(index, None)
        for index, _, _, output in batch_update.added:
            self.outputs[index] = output
        for source, destination, direction in batch_update.moved:
            moved, other = self.outputs.pop(source, None), self.outputs.pop(destination, None)
            if moved is not None:
                self.outputs[destination] = moved
            if other is not None and direction == MoveDirectionality.SWAP:
                self.outputs[source] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, output in self.outputs.items():
            if output:
                logits[index, output[-1]] = -1e9
            logits[index, len(output) % VOCAB_SIZE] += 5
        return logits


@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_custom_processor(processed: tuple[Any, Any], temperature: float, draft: str) -> None:
    plain, medusa = processed
    requests = harness.prompts(4, lengths=[3, 20, 70], vocab_size=VOCAB_SIZE, seed=1)
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=24, ignore_eos=True)
    expected = harness.answers(plain, requests, params)
    assert_same(medusa, requests, params, expected, draft)


@pytest.mark.parametrize("draft", harness.HIT_RATES)
def test_custom_processor_when_others_come_and_leave(
    processed: tuple[Any, Any], draft: str
) -> None:
    """Its state goes by batch index, and those move; half of the requests are aborted."""
    plain, medusa = processed
    pick = random.Random(21)
    arrivals = [
        replace(arrival, abort_after=pick.choice([None, pick.randint(1, 6)]))
        for arrival in random_arrivals(pick)
    ]
    expected = run_arrivals(plain, arrivals, medusa=False)
    drafter = harness.plant(
        medusa, harness.random_trees(pick, 8), VOCAB_SIZE, harness.HIT_RATES[draft]
    )
    for arrival in arrivals:
        drafter.learn(arrival.prompt, expected[arrival.request_id].token_ids)
    found = run_arrivals(medusa, arrivals, medusa=True)
    assert len(found) < len(arrivals), "nothing was aborted"
    assert_equal(found, expected, arrivals)
    assert drafter.branching_steps > 20
    assert (sum(drafter.accepted) > 20) == (draft != "adversarial")


@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_thinking_budgets(thinkers: tuple[Any, Any], temperature: float, draft: str) -> None:
    """The end of thinking is forced on the requests whose budget is spent, not on row 0."""
    plain, medusa = thinkers
    requests = [[1, 2, 3], [4, 5, 6, START], [7, 8, 9, START]]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=1,
            max_tokens=20,
            ignore_eos=True,
            thinking_token_budget=budget,
        )
        for budget in (None, 5, 9)
    ]
    expected = harness.answers(plain, requests, params)
    assert END_MARK in expected[1][0].text
    assert_same(medusa, requests, params, expected, draft)


@pytest.mark.parametrize("draft", harness.HIT_RATES)
def test_a_grammar_follows_a_spent_budget(
    thinkers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """Thinking is free until its end is forced; from there on the grammar rules."""
    plain, medusa = thinkers
    parser = ReasoningParserManager.get_reasoning_parser("deepseek_r1")
    for engine in thinkers:
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        monkeypatch.setattr(scheduler.structured_output_manager, "reasoner_cls", parser)
    requests = [[i, 5, 6, START] for i in range(4)]
    params = [
        SamplingParams(
            temperature=0.8,
            seed=1,
            max_tokens=40,
            thinking_token_budget=budget,
            logit_bias={EOS_TOKEN_ID: -100},
            structured_outputs=StructuredOutputsParams(regex="([a-f]{3}-[0-9]{2} ){3}"),
        )
        for budget in (3, 4, 5, 6)
    ]
    expected = harness.answers(plain, requests, params)
    for [answer] in expected:
        assert re.search(r"</think>([a-f]{3}-[0-9]{2} ){3}$", answer.text)
    assert_same(medusa, requests, params, expected, draft)


def assert_same(
    medusa: Any,
    requests: list[list[int]],
    params: Any,
    expected: list[list[harness.Answer]],
    draft: str,
) -> None:
    drafter = harness.plant(medusa, [harness.BUSHY], VOCAB_SIZE, harness.HIT_RATES[draft])
    for request, known in zip(requests, expected, strict=True):
        drafter.learn(request, known[0].token_ids)
    assert harness.answers(medusa, requests, params) == expected
    if draft == "oracle":
        assert drafter.branching_steps > 0
        assert sum(drafter.accepted) > 0


@pytest.fixture(scope="module")
def thinkers(make_engine: Any, random_heads: Path) -> tuple[Any, Any]:
    """Plain vLLM and Medusa, both with thinking budgets."""
    reasoning = {"reasoning_start_str": "<think>", "reasoning_end_str": END_MARK}
    return make_engine(reasoning_config=ReasoningConfig(**reasoning)), make_engine(
        reasoning_config=ReasoningConfig(**reasoning), speculative_config=speculative(random_heads)
    )


@pytest.fixture(scope="module")
def processed(make_engine: Any, random_heads: Path) -> tuple[Any, Any]:
    """Plain vLLM and Medusa, both with a processor of their own."""
    return make_engine(logits_processors=[NoRepeat]), make_engine(
        logits_processors=[NoRepeat], speculative_config=speculative(random_heads)
    )


def speculative(heads: Path) -> dict[str, Any]:
    return harness.speculation(heads)
