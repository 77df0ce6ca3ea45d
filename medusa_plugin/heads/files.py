"""The files of a heads directory: tensors, pickled or not, and JSON; what is wrong is named."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from medusa_plugin.heads.base import HeadsError

CONFIG_FILE = "config.json"
DRAFT_VOCAB_FILE = "draft_vocab.safetensors"
DRAFT_VOCAB_KEY = "token_ids"

Shape = tuple[int, ...]

FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INTEGERS = {"I32": torch.int32, "I64": torch.int64}
FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_CODES = {dtype: code for code, dtype in (FLOATS | INTEGERS | FLOAT8).items()}


@dataclass(frozen=True)
class Header:
    """What a file says of a tensor before its values are read."""

    file: Path
    shape: Shape
    dtype: str
    """As safetensors writes it: "F32", "BF16", ..., or torch's name of a rare one."""

    @property
    def num_bytes(self) -> int:
        """Of its values; 0 for rare dtypes."""
        known = FLOATS | INTEGERS | FLOAT8
        size = known[self.dtype].itemsize if self.dtype in known else 0
        return size * torch.Size(self.shape).numel()


def is_there(file: Path) -> bool:
    """Whether a file that may be missing has to be read: a broken link is not passed over."""
    return file.exists() or file.is_symlink()


def read_headers(file: Path) -> dict[str, Header]:
    """Header of each tensor; of a safetensors file no value is read.

    Raises:
        HeadsError: the file is corrupt.
    """
    if file.suffix == ".safetensors":
        headers = {}
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    view = opened.get_slice(name)
                    headers[name] = Header(file, tuple(view.get_shape()), view.get_dtype())
        except (SafetensorError, OSError) as error:
            raise HeadsError(f"{file} is not a readable safetensors file: {error}") from error
        return headers
    return {
        name: Header(file, tuple(tensor.shape), _CODES.get(tensor.dtype, str(tensor.dtype)))
        for name, tensor in _read_pickle(file).items()
    }


def read_tensors(file: Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors by name, on the CPU: those of `names`, or all. Of the others no value is read.

    Raises:
        HeadsError: the file is corrupt.
    """
    if file.suffix != ".safetensors":
        tensors = _read_pickle(file)
        return tensors if names is None else {name: tensors[name] for name in names}
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in names or opened.keys()}
    except (SafetensorError, OSError) as error:
        raise HeadsError(f"{file} is not a readable safetensors file: {error}") from error


def _read_pickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        # weights_only: a pickle may carry code. Only zip archives can be memory-mapped.
        loaded = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except Exception as error:  # a damaged pickle fails in whatever way its bytes lead to
        raise HeadsError(
            f"{file} cannot be read as plain tensors; it is corrupt or carries code, which is "
            f"never run: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()
    ):
        raise HeadsError(f"{file}: expected a dict of tensors by name")
    for name, tensor in loaded.items():
        if (reason := _is_not_plain(tensor)) is not None:
            raise HeadsError(f"{file}: {name[:100]!r} {reason}: save it as a dense tensor")
    return loaded


def _is_not_plain(tensor: torch.Tensor) -> str | None:
    """What keeps a tensor from being numbers of its own, one after the other, in memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"is sparse or nested ({tensor.layout})"
    if tensor.is_quantized:
        return f"is quantised ({tensor.dtype})"
    if tensor.device.type != "cpu":
        return f"has no values (it is on the device {tensor.device.type!r})"
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return f"repeats few numbers to shape {list(tensor.shape)}"
    return None


def write_tensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file that all may read; makes its directory."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # a server may run as another user


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        HeadsError: there is none.
    """
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise HeadsError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise HeadsError(f"{file}: expected a JSON object, got {type(loaded).__name__}")
    return loaded
