"""Custom logits processors see, at every row of a walk, what they see in plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE


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
def test_custom_processor(
    make_engine: Any, random_heads: Path, temperature: float, draft: str
) -> None:
    plain = make_engine(logits_processors=[NoRepeat])
    medusa = make_engine(
        logits_processors=[NoRepeat],
        speculative_config={
            "method": "medusa",
            "model": str(random_heads),
            "num_speculative_tokens": harness.MAX_NODES,
        },
    )
    requests = harness.prompts(4, lengths=[3, 20, 70], vocab_size=VOCAB_SIZE, seed=1)
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=24, ignore_eos=True)
    expected = harness.answers(plain, requests, params)
    drafter = harness.plant(
        medusa, [harness.BUSHY, harness.DEEP], VOCAB_SIZE, harness.HIT_RATES[draft]
    )
    for request, known in zip(requests, expected, strict=True):
        drafter.learn(request, known[0].token_ids)
    assert harness.answers(medusa, requests, params) == expected
    if draft == "oracle":
        assert sum(drafter.accepted) > 0


@pytest.mark.parametrize("draft", ["oracle", "adversarial"])
def test_thinking_budgets(make_engine: Any, random_heads: Path, draft: str) -> None:
    """The end of thinking is forced on the requests whose budget is spent, not on row 0."""
    reasoning = {"reasoning_start_str": "<", "reasoning_end_str": "#@"}
    plain = make_engine(reasoning_config=ReasoningConfig(**reasoning))
    medusa = make_engine(
        reasoning_config=ReasoningConfig(**reasoning),
        speculative_config={
            "method": "medusa",
            "model": str(random_heads),
            "num_speculative_tokens": harness.MAX_NODES,
        },
    )
    start = plain.get_tokenizer().encode("<", add_special_tokens=False)
    requests = [[1, 2, 3], [4, 5, 6, *start], [7, 8, 9, *start]]
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, thinking_token_budget=budget)
        for budget in (None, 5, 9)
    ]
    expected = harness.answers(plain, requests, params)
    assert "#@" in expected[1][0].text
    drafter = harness.plant(medusa, [harness.BUSHY], VOCAB_SIZE, harness.HIT_RATES[draft])
    for request, known in zip(requests, expected, strict=True):
        drafter.learn(request, known[0].token_ids)
    assert harness.answers(medusa, requests, params) == expected
    if draft == "oracle":
        assert sum(drafter.accepted) > 0
