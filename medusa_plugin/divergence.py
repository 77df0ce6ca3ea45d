"""Where two recorded greedy generations part, and whether rounding explains it.

A run is a JSON file:

    {"version": 1, "source": "plain vLLM 0.32.0", "dtype": "bfloat16", "logit_magnitude": 32,
     "generations": [{"prompt": [1, 2], "token_ids": [7, 9],
                      "logprobs": [{"7": -0.1, "8": -2.5}, {"9": -0.7, "4": -0.8}]}]}

with, for each generated token, the natural log-probabilities of some tokens at its position, its
own among them. Their differences are differences of logits, since the normaliser cancels.

Two runs of one model differ in the shape of their batches, hence in the order of their sums, hence
in rounding. A logit near 2^e is a multiple of 2^(e - p) in a dtype of p mantissa bits (bfloat16 7,
float16 10, float32 23), so near 32 (in [16, 32)) bfloat16 logits lie 0.125 apart. In 16 bits the
sums are kept in float32 and only what is stored between layers is rounded: a few of these steps.
In float32 nothing is coarser than the sums, whose own error of many small roundings counts. Both
tokens of a parting have to be closer than that, on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from medusa_plugin.atomic_file import write_whole

DType = Literal["bfloat16", "float16", "float32"]

MANTISSA_BITS: Mapping[str, int] = {"bfloat16": 7, "float16": 10, "float32": 23}
STEPS: Mapping[str, int] = {"bfloat16": 4, "float16": 4, "float32": 64}
"""How many distances of neighbouring numbers rounding may move the gap of two logits."""


class RunFileError(ValueError):
    """A recorded run cannot be read or compared; the message names the file or the prompt."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Generation(_Model):
    """One greedy answer."""

    prompt: tuple[int, ...]
    """Token ids."""
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, FiniteFloat], ...]
    """One per generated token: token id -> log-probability, the generated token among them."""

    @model_validator(mode="after")
    def _one_per_token(self) -> Generation:
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"{len(self.token_ids)} tokens, but logprobs of {len(self.logprobs)} positions"
            )
        for i, (token, known) in enumerate(zip(self.token_ids, self.logprobs, strict=True)):
            if token not in known:
                raise ValueError(f"position {i}: no logprob of the generated token {token}")
        return self


class RecordedRun(_Model):
    """What one engine answered."""

    version: Literal[1] = 1
    source: str
    """What made it, for the report."""
    dtype: DType
    """Of the model."""
    logit_magnitude: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """Bound of the logits that compete for the first place."""
    generations: tuple[Generation, ...] = Field(min_length=1)

    @property
    def rounding(self) -> float:
        """Gap of two logits up to which rounding may swap them."""
        exponent = math.ceil(math.log2(self.logit_magnitude)) - 1
        return STEPS[self.dtype] * float(2.0 ** (exponent - MANTISSA_BITS[self.dtype]))


@dataclass(frozen=True)
class Parting:
    """Where two answers to one prompt first differ."""

    position: int
    """Index among the generated tokens."""
    tokens: tuple[int | None, int | None]
    """What each side generated there; None where it had ended."""
    gaps: tuple[float | None, float | None]
    """On each side, the logit of its own token less that of the other's; None if unknown."""
    verdict: Literal["tie", "fault"]
    reason: str


@dataclass(frozen=True)
class Report:
    """The comparison of two runs."""

    sources: tuple[str, str]
    rounding: float
    """Gap that counts as a tie."""
    partings: tuple[Parting | None, ...]
    """One per prompt; None where the answers are equal."""

    @property
    def faults(self) -> int:
        """Prompts whose parting rounding does not explain."""
        return sum(p is not None and p.verdict == "fault" for p in self.partings)


def read_run(path: Path) -> RecordedRun:
    """Read a recorded run.

    Raises:
        RunFileError: it cannot be read, or is none.
    """
    try:
        return RecordedRun.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RunFileError(f"{path} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise RunFileError(f"{path} is not a recorded run: {place}: {first['msg']}") from None


def write_run(run: RecordedRun, path: Path) -> None:
    """Write a run for `read_run`.

    Raises:
        RunFileError: it cannot be written.
    """
    try:
        write_whole(path, run.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise RunFileError(f"{path} cannot be written: {error}") from None


def compare(a: RecordedRun, b: RecordedRun) -> Report:
    """Compare two runs over the same prompts, in their order.

    Raises:
        RunFileError: the prompts differ.
    """
    if len(a.generations) != len(b.generations):
        raise RunFileError(
            f"the runs have {len(a.generations)} and {len(b.generations)} prompts: record both "
            "over the same ones"
        )
    rounding = max(a.rounding, b.rounding)
    partings = []
    for i, (ours, theirs) in enumerate(zip(a.generations, b.generations, strict=True)):
        if ours.prompt != theirs.prompt:
            raise RunFileError(f"the runs differ in prompt {i}: record both over the same ones")
        partings.append(_parting(ours, theirs, rounding))
    return Report((a.source, b.source), rounding, tuple(partings))


def _parting(a: Generation, b: Generation, rounding: float) -> Parting | None:
    if a.token_ids == b.token_ids:
        return None
    pairs = enumerate(zip(a.token_ids, b.token_ids, strict=False))
    position = next((i for i, (x, y) in pairs if x != y), None)
    if position is None:
        position = min(len(a.token_ids), len(b.token_ids))
        tokens = (_at(a, position), _at(b, position))
        return Parting(
            position, tokens, (None, None), "fault", "one side ended where the other went on"
        )
    x, y = a.token_ids[position], b.token_ids[position]
    gaps = _gap(a.logprobs[position], x, y), _gap(b.logprobs[position], y, x)
    known = [gap for gap in gaps if gap is not None]
    if len(known) < 2:
        reason = "the other side's token is not among the recorded logprobs"
    elif min(known) < 0:
        reason = "a side did not choose its most likely token: the runs have to be greedy"
    elif max(known) > rounding:
        reason = f"rounding explains no gap above {rounding:.2g}"
    else:
        return Parting(position, (x, y), gaps, "tie", "tie within rounding")
    return Parting(position, (x, y), gaps, "fault", reason)


def _at(generation: Generation, position: int) -> int | None:
    known = generation.token_ids
    return known[position] if position < len(known) else None


def _gap(logprobs: Mapping[int, float], own: int, other: int) -> float | None:
    return logprobs[own] - logprobs[other] if other in logprobs else None
