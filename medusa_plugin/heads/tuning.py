"""`tuning.json`: what `medusa tune` learnt about heads, bound to their weights by a fingerprint."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from medusa_plugin.atomic_file import write_whole
from medusa_plugin.heads.base import HeadsError
from medusa_plugin.heads.files import is_there
from tvm_ops.artifact import cache_root

TUNING_FILE = "tuning.json"

_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16

Share = Annotated[float, Field(ge=0, le=1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HeadScaling(_Model):
    """Platt scaling of one head: P(right) = sigmoid(bias + scale * logit(p))."""

    bias: float = Field(default=0.0, allow_inf_nan=False)
    scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)


class MeasuredOn(_Model):
    """Where a tuning comes from; nothing is decided by it."""

    model: str
    prompts: str
    num_prompts: int
    num_tokens: int
    """Of the answers, loops cut."""
    dtype: str
    medusa: str
    """Version of the plugin."""


class HeadsTuning(_Model):
    """Measured properties of heads."""

    version: Literal[1] = 1
    fingerprint: str
    """`fingerprint` of the weights file."""
    draft_vocab_size: int = Field(ge=1)
    """The probabilities are normalised over that many tokens."""
    calibration: tuple[HeadScaling, ...] = Field(min_length=1)
    """One per head."""
    accuracies: tuple[Annotated[tuple[Share, ...], Field(min_length=1)], ...]
    """Entry [h][k]: how often candidate k of head h is right."""
    measured_on: MeasuredOn

    @model_validator(mode="after")
    def _same_heads(self) -> HeadsTuning:
        if len(self.accuracies) != len(self.calibration):
            raise ValueError(
                f"calibration is for {len(self.calibration)} heads, accuracies for "
                f"{len(self.accuracies)}"
            )
        return self


def fingerprint(weights: Path) -> str:
    """Hex digest of the file's size and of 64 blocks of 64 KiB spread evenly over it.

    Reads 4 MiB of however many gigabytes. Training moves nearly every weight, so other weights of
    the same shapes differ in every block; an edit of few bytes between them goes unnoticed.

    Raises:
        HeadsError: the file cannot be read.
    """
    try:
        size = weights.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with weights.open("rb") as file:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(file.read())
            else:
                for i in range(_SAMPLES):
                    file.seek(i * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise HeadsError(f"{weights} cannot be read: {error}") from error
    return digest.hexdigest()[:32]


def cached_tuning_file(digest: str) -> Path:
    """Where the tuning of weights with this fingerprint lies if not beside them."""
    return cache_root() / "tuning" / f"{digest}.json"


def find_tuning(weights: Path, num_heads: int) -> HeadsTuning | None:
    """The tuning of the heads in file `weights`, or None.

    The user's cache comes first: it is written where the heads' own directory cannot be, and then
    holds the newer one.

    Raises:
        HeadsError: there is one, but it is malformed or for other weights.
    """
    beside = weights.parent / TUNING_FILE
    digest = fingerprint(weights)
    for file in (cached_tuning_file(digest), beside):
        if is_there(file):
            return _read(file, weights, digest, num_heads)
    return None


def write_tuning(tuning: HeadsTuning, weights: Path, directory: Path | None) -> Path:
    """Write `tuning` and say where.

    Args:
        tuning: of the heads in `weights`.
        weights: the weights file.
        directory: where to; None for beside the weights, or the cache where that is read-only.

    Raises:
        HeadsError: it cannot be written.
    """
    cached = cached_tuning_file(tuning.fingerprint)
    try:
        file = _write(tuning, (directory or weights.parent) / TUNING_FILE)
    except HeadsError:
        if directory is not None:
            raise
        return _write(tuning, cached)
    if file.parent.samefile(weights.parent):
        cached.unlink(missing_ok=True)  # older, and it would come first
    return file


def _write(tuning: HeadsTuning, file: Path) -> Path:
    try:
        write_whole(file, tuning.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise HeadsError(
            f"{file} cannot be written ({error}): choose another directory with --out"
        ) from error
    return file


def _read(file: Path, weights: Path, digest: str, num_heads: int) -> HeadsTuning:
    remedy = f"run 'medusa tune' again, or delete {file}"
    try:
        tuning = HeadsTuning.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise HeadsError(f"{file} cannot be read: {error}; {remedy}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise HeadsError(
            f"{file} is not a tuning of heads: {place}: {first['msg']}; {remedy}"
        ) from None
    if tuning.fingerprint != digest:
        raise HeadsError(
            f"{file} was measured on other weights (fingerprint {tuning.fingerprint}) than "
            f"{weights} ({digest}): {remedy}"
        )
    if len(tuning.calibration) != num_heads:
        raise HeadsError(
            f"{file} is for {len(tuning.calibration)} heads, but {weights.name} has {num_heads}: "
            f"{remedy}"
        )
    return tuning
