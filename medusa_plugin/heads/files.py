"""The files of a heads directory: tensors, pickled or not, and JSON; what is wrong is named."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from medusa_plugin.heads.base import HeadsError

Shape = tuple[int, ...]

_FLOAT_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


def is_there(file: Path) -> bool:
    """Whether a file that may be missing has to be read: a broken link is not passed over."""
    return file.exists() or file.is_symlink()


def read_shapes(file: Path) -> dict[str, Shape]:
    """Shape of each tensor; of a safetensors file only the header is read.

    Raises:
        HeadsError: the file is corrupt, or a tensor is no plain float.
    """
    if file.suffix == ".safetensors":
        shapes = {}
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    view = opened.get_slice(name)
                    _require_float(name, view.get_dtype(), file)
                    shapes[name] = tuple(view.get_shape())
        except (SafetensorError, OSError) as error:
            raise HeadsError(f"{file} is not a readable safetensors file: {error}") from error
        return shapes
    tensors = _read_pickle(file)
    for name, tensor in tensors.items():
        _require_float(name, _FLOAT_DTYPES.get(tensor.dtype, str(tensor.dtype)), file)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors by name, on the CPU.

    Raises:
        HeadsError: the file is corrupt.
    """
    if file.suffix != ".safetensors":
        return _read_pickle(file)
    try:
        return load_file(file)
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


def _require_float(name: str, dtype: str, file: Path) -> None:
    if dtype not in _FLOAT_DTYPES.values():
        raise HeadsError(
            f"{file}: {name} has dtype {dtype}, expected one of "
            f"{', '.join(_FLOAT_DTYPES.values())}: convert the heads"
        )


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
