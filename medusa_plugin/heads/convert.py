"""Writes plain Medusa heads in the layout of another project; the values do not change."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from medusa_plugin.atomic_file import write_whole
from medusa_plugin.heads.base import HeadsError
from medusa_plugin.heads.checkpoint import peek_heads
from medusa_plugin.heads.files import CONFIG_FILE, DRAFT_VOCAB_FILE, FLOAT8, Header, is_there
from medusa_plugin.heads.formats import (
    FASTER_DECODING,
    LM_HEAD,
    MERGED,
    TENSORRT_LLM,
    VLLM,
    Layout,
    TensorKey,
)
from medusa_plugin.heads.hub import CALIBRATION_FILE
from medusa_plugin.heads.medusa_checkpoint import MedusaVariant
from medusa_plugin.heads.source import HEADS_FILES, MEDUSA_FILES, MODEL_FILES

Progress = Callable[[int], None]
"""Is told how many bytes were written since the last call."""


@dataclass(frozen=True)
class Target:
    """A format that heads can be converted to."""

    layout: Layout
    file: str
    own_lm_head: bool | None
    """Whether it wants a language-model head per head (True), the target's (False), or either."""
    config: Callable[[MedusaVariant], dict[str, object]]


def _medusa_config(variant: MedusaVariant) -> dict[str, object]:
    return {
        "base_model_name_or_path": _base_model(variant),
        "medusa_num_heads": variant.num_heads,
        "medusa_num_layers": variant.num_layers,
    }


def _vllm_config(variant: MedusaVariant) -> dict[str, object]:
    rows = variant.table_size
    vocab_size = variant.vocab_size or variant.source.config.get("vocab_size", rows)
    config: dict[str, object] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": variant.hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": variant.table_rows or vocab_size,
        "num_heads": variant.num_heads,
        "num_hidden_layers": variant.num_layers,
        "medusa_fc_bias": variant.has_bias,
        "original_lm_head": not variant.owns_lm_head,
    }
    return config if variant.logit_scale == 1.0 else config | {"logit_scale": variant.logit_scale}


def _tensorrt_config(variant: MedusaVariant) -> dict[str, object]:
    return {
        "architecture": "MedusaForCausalLM",
        "num_medusa_heads": variant.num_heads,
        "num_medusa_layers": variant.num_layers,
        "max_draft_len": 63,
        "hidden_size": variant.hidden_size,
        "vocab_size": variant.vocab_size,
    }


def _mlc_config(variant: MedusaVariant) -> dict[str, object]:
    return {
        "model_type": "medusa",
        "hidden_size": variant.hidden_size,
        "vocab_size": variant.vocab_size,
        "medusa_num_heads": variant.num_heads,
        "medusa_num_layers": variant.num_layers,
    }


TARGETS = {
    "medusa-v1": Target(FASTER_DECODING, MEDUSA_FILES[0], True, _medusa_config),
    "medusa-v2": Target(
        FASTER_DECODING, MEDUSA_FILES[0], False, lambda v: _medusa_config(v) | {"version": "2"}
    ),
    "vllm": Target(VLLM, "model.safetensors", None, _vllm_config),
    "tensorrt-llm": Target(TENSORRT_LLM, "rank0.safetensors", True, _tensorrt_config),
    "mlc": Target(MERGED, "model.safetensors", True, _mlc_config),
}


@dataclass(frozen=True)
class Conversion:
    """A conversion that is possible, before anything is written."""

    variant: MedusaVariant
    destination: Path
    target: Target
    files: tuple[Path, ...]
    """Beside the weights, copied as they are."""
    notes: tuple[str, ...]
    """What the user should know."""

    @property
    def num_bytes(self) -> int:
        """Of the weights to be written."""
        return sum(header.num_bytes for header, _ in self._plan().values())

    def write(self, progress: Progress = lambda _: None) -> None:
        """Write all files; each of them whole or not at all.

        Raises:
            HeadsError: a file cannot be read or written.
        """
        try:
            self.destination.mkdir(parents=True, exist_ok=True)
            _write_safetensors(self.destination / self.target.file, self._plan(), progress)
            config = self.target.config(self.variant)
            write_whole(self.destination / CONFIG_FILE, json.dumps(config, indent=1) + "\n")
            for file in self.files:
                shutil.copyfile(file, self.destination / file.name)
        except OSError as error:
            raise HeadsError(f"{self.destination} cannot be written: {error}") from error

    def _plan(self) -> dict[str, tuple[Header, Callable[[], torch.Tensor]]]:
        """Header and value of each tensor, by its new name."""
        variant, layout = self.variant, self.target.layout
        read = _reader(variant)
        plan = {}
        for key, name in variant.tensors().items():
            plan[layout.name(key, variant.num_layers)] = read(name)
            if key.part == "weight" and key.layer != LM_HEAD and not variant.has_bias:
                bias = TensorKey(key.head, key.layer, "bias")
                if self.target.layout is not VLLM:  # the others always have one
                    header, _ = read(name)
                    plan[layout.name(bias, variant.num_layers)] = _zeros(header)
        if variant.shared_lm_head:
            # Under this name vLLM takes it for the one that all heads share.
            plan["lm_heads.0.weight"] = read(variant.shared_lm_head)
        if variant.token_map:
            plan["token_map"] = read(variant.token_map)
        return plan


def plan_conversion(source: Path | str, destination: Path, to: str, *, force: bool) -> Conversion:
    """Check that heads can be converted.

    Args:
        source: directory or hub id of the heads.
        destination: directory to write to.
        to: a key of `TARGETS`.
        force: whether files in `destination` may be overwritten.

    Raises:
        HeadsError: the heads cannot be read, `to` cannot express them, or there are files in the
            way; says which.
    """
    target = TARGETS[to]
    info = peek_heads(source, use_tuning=False)
    variant = info.variant
    if not isinstance(variant, MedusaVariant):
        raise HeadsError(
            f"{info.path}: {info.kind} heads cannot be written as {to}, which knows plain Medusa "
            "heads only"
        )
    _require_expressible(variant, target, to)
    directory = variant.source.directory
    _require_free(directory, destination, target, force)
    copied = [directory / name for name in (DRAFT_VOCAB_FILE, CALIBRATION_FILE)]
    files = tuple(file for file in copied if file.is_file())
    return Conversion(variant, destination, target, files, tuple(_notes(variant, target)))


def _require_expressible(variant: MedusaVariant, target: Target, to: str) -> None:
    def refuse(what: str) -> HeadsError:
        return HeadsError(f"{variant.source.file}: {to} cannot express {what}")

    if target.layout is VLLM:
        if not variant.owns_lm_head and variant.shared_lm_head is None:
            raise refuse(
                "heads that share the target's language-model head: vLLM reads it from the heads' "
                "own files"
            )
        return
    if variant.token_map is not None:
        raise refuse("a draft vocabulary among the tensors (token_map)")
    if variant.shared_lm_head is not None:
        raise refuse("one language-model head of their own for all heads (original_lm_head)")
    if variant.logit_scale != 1.0:
        raise refuse(f"logit_scale {variant.logit_scale}")
    if target.own_lm_head and not variant.owns_lm_head:
        raise refuse("heads that share the target's language-model head: convert to medusa-v2")
    if not target.own_lm_head and variant.owns_lm_head:
        raise refuse("heads with language-model heads of their own: convert to medusa-v1")


def _require_free(source: Path, destination: Path, target: Target, force: bool) -> None:
    if destination.exists() and not destination.is_dir():
        raise HeadsError(f"{destination} is a file: name a directory")
    if destination.is_dir() and destination.samefile(source):
        raise HeadsError(f"{destination} is where the heads come from: name another directory")
    for name in (*HEADS_FILES, *MODEL_FILES):
        if name != target.file and is_there(destination / name):
            raise HeadsError(
                f"{destination / name} would be mixed up with the converted heads: name another "
                "directory, or move it away"
            )
    for name in (target.file, CONFIG_FILE, DRAFT_VOCAB_FILE, CALIBRATION_FILE, "tuning.json"):
        if is_there(destination / name) and not force:
            raise HeadsError(f"{destination / name} is there already: give --force to overwrite")


def _notes(variant: MedusaVariant, target: Target) -> Iterator[str]:
    if not variant.has_bias and target.layout is not VLLM:
        yield "the heads have no biases: zeros are written, which change nothing"
    if any(header.dtype in FLOAT8 for header in variant.source.headers.values()):
        yield "8-bit weights are dequantised to BF16"
    if (variant.source.directory / "tuning.json").is_file():
        yield "tuning.json belongs to the old file: run 'medusa tune' again"


def _base_model(variant: MedusaVariant) -> object:
    return variant.source.config.get("base_model_name_or_path", "")


def _reader(
    variant: MedusaVariant,
) -> Callable[[str], tuple[Header, Callable[[], torch.Tensor]]]:
    """Gives header and value as they will be written."""
    source = variant.source
    whole: Mapping[str, torch.Tensor] = {}
    if source.file.suffix != ".safetensors":  # opened once, its values are mapped
        extras = [name for name in (variant.token_map,) if name]
        whole = source.read([*variant.names, *extras])

    def read(name: str) -> tuple[Header, Callable[[], torch.Tensor]]:
        header = source.headers[name]
        if header.dtype in FLOAT8:
            header = Header(header.file, header.shape, "BF16")
            return header, lambda: source.read([name])[name].bfloat16()
        return header, lambda: whole[name] if name in whole else source.read([name])[name]

    return read


def _zeros(like: Header) -> tuple[Header, Callable[[], torch.Tensor]]:
    """A bias for a weight."""
    dtype = "BF16" if like.dtype in FLOAT8 else like.dtype
    header = Header(like.file, like.shape[:1], dtype)
    return header, lambda: torch.zeros(header.num_bytes, dtype=torch.uint8)


def _write_safetensors(
    file: Path,
    plan: Mapping[str, tuple[Header, Callable[[], torch.Tensor]]],
    progress: Progress,
) -> None:
    """Write tensors one after the other, so that only one is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (tensor, _) in plan.items():
        end = start + tensor.num_bytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for tensor, load in plan.values():
                progress(_write_values(stream, load(), tensor.num_bytes))
        Path(temporary).chmod(0o644)  # made for us alone
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _write_values(stream: BinaryIO, tensor: torch.Tensor, num_bytes: int) -> int:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    assert flat.numel() == num_bytes
    stream.write(flat.numpy().data)
    return num_bytes
