"""No numbers on other outputs: every engine must say in float32 what plain vLLM says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_plugin.vllm_glue.offline_engine import Batch, OfflineEngine

IDENTITY_TOKENS = 32
SINGLE_PROMPTS = 4  # asked alone; the largest batch asks all

Answers = list[tuple[tuple[int, ...], ...]]
"""Per question, the token ids of each of its requests."""


class OutputsDifferError(RuntimeError):
    """An engine of ours gave other tokens than plain vLLM, so there are no numbers."""


@dataclass(frozen=True)
class Question:
    """Prompts that are asked together; `numbers` are their places in the list of prompts."""

    numbers: tuple[int, ...]
    temperature: float
    repetition: int = 0

    def batch(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        in_flight: int | None = None,
        time_stages: bool = False,
    ) -> Batch:
        """The request. Each sampled one has a seed of its own, the same for every engine."""
        return Batch(
            tuple(({"role": "user", "content": prompts[number]},) for number in self.numbers),
            max_tokens,
            temperature=self.temperature,
            seeds=tuple(1000 * self.repetition + i for i in range(len(self.numbers)))
            if self.temperature > 0
            else None,
            ignore_eos=True,
            in_flight=in_flight,
            time_stages=time_stages,
        )


@dataclass(frozen=True)
class Difference:
    """Where an engine first said something else."""

    engine: str
    prompt: int
    batch: int
    temperature: float
    position: int
    expected: int | None
    got: int | None

    def __str__(self) -> str:
        return (
            f"{self.engine} differs from plain in float32 on prompt {self.prompt + 1} at batch "
            f"{self.batch}, temperature {self.temperature:g}: token {self.position + 1} of its "
            f"answer is {self.got}, expected {self.expected}"
        )


def groups(num_prompts: int, batch: int) -> list[tuple[int, ...]]:
    """Numbers of prompts in groups of `batch`, so that each prompt is asked; in a cycle."""
    count = -(-num_prompts // batch)
    return [
        tuple((group * batch + i) % num_prompts for i in range(batch)) for group in range(count)
    ]


def questions(
    num_prompts: int, batches: Sequence[int], temperatures: Sequence[float]
) -> list[Question]:
    """What is asked to compare the engines: some prompts alone, all in the largest batch."""
    asked = groups(num_prompts, max(batches))
    if max(batches) > 1:
        asked += groups(num_prompts, 1)[:SINGLE_PROMPTS]
    return [Question(group, temperature) for temperature in temperatures for group in asked]


def answer_all(engine: OfflineEngine, prompts: Sequence[str], asked: Sequence[Question]) -> Answers:
    """The token ids of every answer."""
    return [
        engine.generate_batch(question.batch(prompts, IDENTITY_TOKENS)).token_ids
        for question in asked
    ]


def differences(
    engine: str, asked: Sequence[Question], expected: Answers, got: Answers
) -> list[Difference]:
    """The first difference of each question in which there is one."""
    found = []
    for question, theirs, mine in zip(asked, expected, got, strict=True):
        for number, right, answer in zip(question.numbers, theirs, mine, strict=True):
            if right != answer:
                found.append(_difference(engine, question, number, right, answer))
                break
    return found


def _difference(
    engine: str, question: Question, number: int, right: Sequence[int], answer: Sequence[int]
) -> Difference:
    shorter = min(len(right), len(answer))
    position = next((i for i in range(shorter) if right[i] != answer[i]), shorter)
    return Difference(
        engine,
        number,
        len(question.numbers),
        question.temperature,
        position,
        right[position] if position < len(right) else None,
        answer[position] if position < len(answer) else None,
    )


def judge(found: Sequence[Difference], ours: bool) -> str:
    """A word on an engine whose differences from plain are `found`.

    Raises:
        OutputsDifferError: it is ours, and there is one.
    """
    if not found:
        return "identical"
    if ours:
        raise OutputsDifferError(str(found[0]))
    greedy = [difference for difference in found if difference.temperature == 0]
    if greedy:
        return str(greedy[0])
    return "identical if greedy; sampled with other draws than plain vLLM's"
