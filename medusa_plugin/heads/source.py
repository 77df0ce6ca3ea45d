"""Where heads lie: the files of a directory that may hold them, and what is in these."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_plugin.heads.base import HeadsError, TargetSpec
from medusa_plugin.heads.files import (
    CONFIG_FILE,
    FLOAT8,
    FLOATS,
    Header,
    is_there,
    read_headers,
    read_json_object,
    read_tensors,
)

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
TRAINED_FILE = "heads.safetensors"
HYDRA_FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
HEADS_FILES = (*MEDUSA_FILES, TRAINED_FILE, *HYDRA_FILES)
"""Files that hold heads and nothing else."""
MODEL_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "rank0.safetensors",
)
"""Files of whole models, which may hold heads alone or beside the target's own weights."""

MERGED_PREFIXES = ("medusa_head.", "medusa_heads.")
"""Of heads' tensors among those of a target."""


@dataclass(frozen=True)
class Source:
    """The tensors and the config of a directory with heads; values are read when asked for."""

    directory: Path
    headers: Mapping[str, Header]
    config: Mapping[str, Any]
    """Of `config.json`; empty without one."""
    others: int = 0
    """Tensors of the target in the same files."""

    @property
    def file(self) -> Path:
        """The first file with tensors of the heads; stands for them in messages."""
        return next(iter(self.headers.values())).file

    def require_floats(self, names: Collection[str]) -> None:
        """Refuse tensors that are no plain floats, except 8-bit ones with a scale.

        Raises:
            HeadsError: names the tensor and the remedy.
        """
        for name in names:
            header = self.headers[name]
            if header.dtype in FLOATS or (header.dtype in FLOAT8 and self._scale_of(name)):
                continue
            remedy = "convert the heads"
            if header.dtype in FLOAT8:
                remedy = f"its scale {name}_scale is missing: export the heads in BF16"
            raise HeadsError(
                f"{header.file}: {name} has dtype {header.dtype}, expected one of "
                f"{', '.join(FLOATS)}: {remedy}"
            )

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Tensors by name, on the CPU; 8-bit floats come dequantised, as float32.

        Raises:
            HeadsError: a file is corrupt.
        """
        scales = {name: f"{name}_scale" for name in names if self.headers[name].dtype in FLOAT8}
        tensors: dict[str, torch.Tensor] = {}
        wanted = [*names, *scales.values()]
        for file in dict.fromkeys(self.headers[name].file for name in wanted):
            here = [name for name in wanted if self.headers[name].file == file]
            tensors.update(read_tensors(file, here))
        for name, scale_name in scales.items():
            scale = tensors.pop(scale_name).float()
            rows = scale if scale.numel() == 1 else scale.reshape(-1, 1)
            tensors[name] = tensors[name].float() * rows
        return tensors

    def read_for(
        self, names: Collection[str], target: TargetSpec
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors in the target's dtype, on the CPU.

        Raises:
            HeadsError: a file is corrupt, or a tensor has NaN or infinite values.
        """
        pickled = self.file.suffix != ".safetensors"
        # One at a time, so that not all are in memory twice; a pickle is mapped as a whole.
        batches = [names] if pickled else [[name] for name in names]
        for name, tensor in (item for batch in batches for item in self.read(batch).items()):
            cast = tensor.to(target.dtype)
            if not torch.isfinite(cast).all():
                raise HeadsError(
                    f"{self.headers[name].file}: {name} has NaN or infinite values in "
                    f"{target.dtype}: the file is damaged, its training diverged, or the dtype is "
                    "too narrow for it"
                )
            yield name, cast

    def compare_config(self, **found: object) -> Iterator[str]:
        """A warning for each value of the config that differs from what the weights hold."""
        for key, value in found.items():
            if self.config.get(key, value) != value:
                yield (
                    f"{self.directory / CONFIG_FILE} says {key} = {self.config[key]!r}, but "
                    f"{self.file.name} holds {value}: the weights decide"
                )

    def _scale_of(self, name: str) -> bool:
        scale = self.headers.get(f"{name}_scale")
        if scale is None or scale.dtype not in FLOATS:
            return False
        rows = self.headers[name].shape[:1]
        return scale.shape in ((), (1,), rows, (*rows, 1))


def open_source(directory: Path) -> Source:
    """The heads' tensors in `directory`, which may be a target's own.

    Raises:
        HeadsError: there are none, or a file is corrupt; names it.
    """
    if not directory.is_dir():
        raise HeadsError(f"no directory of Medusa heads at {directory}")
    files = _weights_files(directory)
    for file in files:
        if not is_there(file):
            raise HeadsError(f"{file} is missing, but the index of {directory} names it")
    headers: dict[str, Header] = {}
    for file in files:
        for name, header in read_headers(file).items():
            if name in headers:
                raise HeadsError(f"{file}: tensor {name[:100]!r} is also in {headers[name].file}")
            headers[name] = header
    if not headers:
        raise HeadsError(f"{files[0]} holds no tensors")
    config_file = directory / CONFIG_FILE
    config = read_json_object(config_file) if is_there(config_file) else {}
    merged = {name: header for name, header in headers.items() if name.startswith(MERGED_PREFIXES)}
    if files[0].name in HEADS_FILES or not merged:
        return Source(directory, headers, config)
    return Source(directory, merged, config, others=len(headers) - len(merged))


def holds_heads(directory: Path) -> bool:
    """Whether heads lie in `directory`: in files of their own, or among the model's weights."""
    if any((directory / name).is_file() for name in HEADS_FILES):
        return True
    try:
        names = _names_of_model(directory)
    except HeadsError:
        return False  # not for us to judge: whoever loads the model will
    return any(name.startswith(MERGED_PREFIXES) for name in names)


def _names_of_model(directory: Path) -> Collection[str]:
    if not directory.is_dir():
        return ()
    for name in MODEL_FILES:
        file = directory / name
        if file.suffix == ".json" and file.is_file():
            return tuple(_weight_map(file))
        if file.suffix == ".safetensors" and file.is_file():
            return tuple(read_headers(file))
    return ()


def _weights_files(directory: Path) -> list[Path]:
    for name in HEADS_FILES:
        if is_there(directory / name):
            return [directory / name]
    for name in MODEL_FILES:
        file = directory / name
        if not is_there(file):
            continue
        if file.suffix == ".json":
            return [directory / shard for shard in shard_names(file)]
        if name == "rank0.safetensors" and is_there(directory / "rank1.safetensors"):
            raise HeadsError(
                f"{directory} holds a TensorRT-LLM checkpoint split over several ranks "
                "(rank1.safetensors): convert the heads with tp_size 1"
            )
        return [file]
    raise HeadsError(
        f"{directory} holds no Medusa heads: expected {' or '.join(MEDUSA_FILES)}, "
        f"{TRAINED_FILE}, {HYDRA_FILES[1]}, or a model's own files with heads among them"
    )


def shard_names(index: Path) -> list[str]:
    """Names of the files that an index lists; those with heads only where it lists heads.

    Raises:
        HeadsError: it is malformed.
    """
    weight_map = _weight_map(index)
    merged = [file for name, file in weight_map.items() if name.startswith(MERGED_PREFIXES)]
    names = dict.fromkeys(merged or weight_map.values())
    for name in names:
        # An index from elsewhere must not point out of its directory.
        if Path(name).name != name:
            raise HeadsError(f"{index}: {name!r} is no file name")
    return list(names)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise HeadsError(f"{index}: expected 'weight_map', an object of file names by tensor")
    return weight_map
