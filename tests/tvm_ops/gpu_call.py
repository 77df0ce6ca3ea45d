"""Calls of exported GPU kernels by their manifest, in whatever language an engine runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tvm_ops.gpu.tree_tables import TreeTables
from tvm_ops.layouts import DTYPE_NAMES
from tvm_ops.testing import AttentionCase

Values = Mapping[str, Tensor | int | float]


class Engine(Protocol):
    """What compiles and runs one language."""

    language: str
    device: str

    def run(self, path: Path, about: dict[str, Any], grid: tuple[int, int], values: Values) -> None:
        """Run the kernel that a manifest tells `about`; tensors of `values` change in place."""
        ...


def build_kernels(
    language: str, dtypes: Sequence[str], head_dims: Sequence[int], out: Path
) -> None:
    """Export kernels by the command that users have."""
    command = [sys.executable, "-m", "tvm_ops.build", "--target", language, "--out", str(out)]
    command += [f"--dtype={dtype}" for dtype in dtypes]
    command += [f"--head-dim={head_dim}" for head_dim in head_dims]
    subprocess.run(command, check=True, capture_output=True)


class ExportedKernels:
    """A directory that tvm_ops.build has written, and an engine for its language."""

    def __init__(self, directory: Path, engine: Engine) -> None:
        self.directory, self.engine = directory, engine
        self.manifest = json.loads((directory / "manifest.json").read_text())

    @cache  # noqa: B019 (lives as long as the tests)
    def find(self, kernel: str, dtype: str, head_dim: int | None = None) -> dict[str, Any]:
        """The manifest's entry."""
        wanted = (kernel, dtype, head_dim)
        (found,) = (
            entry
            for entry in self.manifest["kernels"]
            if (entry["kernel"], entry["dtype"], entry.get("head_dim")) == wanted
        )
        return found

    def launch(self, about: dict[str, Any], values: Values) -> None:
        """Run a kernel on the grid that its manifest names."""
        numbers = {k: v for k, v in values.items() if isinstance(v, int)}
        width, height = (int(eval(size, {}, numbers)) for size in about["grid"])
        values = {**values, "packGridDimX": width - 1}
        self.engine.run(self.directory / about["file"], about, (width, height), values)

    def attention(self, case: AttentionCase, splits: int = 1, empty_trees: int = 0) -> Tensor:
        """tree_attention, and combine for several splits; returns `out`, unset where unwritten.

        empty_trees: trees without rows that follow those of the case.
        """
        out = case.out.clone()
        dtype, (_, heads, head_dim) = DTYPE_NAMES[out.dtype], out.shape
        kernel = self.find("tree_attention", dtype, head_dim)
        num_blocks, kv_heads, block_size, _ = case.kv_cache.shape
        group, batch = heads // kv_heads, case.batch
        trees = len(batch) + empty_trees
        tables = TreeTables(
            "cpu",
            num_blocks=num_blocks,
            block_size=block_size,
            max_trees=trees,
            max_rows=batch.ancestor_masks.shape[1],
            max_blocks=batch.block_table.shape[1],
            windows=[case.sliding_window],
            fixed_grid=True,
        )
        tables.update(batch)
        records, masks, first_visible = tables.tables(case.sliding_window)
        rows = kernel["tile"]["rows"]
        row_tiles = -(-tables.max_rows * group // rows)
        parts = trees * kv_heads * row_tiles * splits * rows * (head_dim + 2)
        values: dict[str, Tensor | int | float] = {
            "query": case.query,
            "cache": case.kv_cache,
            "out": out,
            "trees": records,
            "masks": masks,
            "first_visible": first_visible,
            "table": tables.block_table,
            "partial": torch.full((parts if splits > 1 else 1,), torch.nan),
            "query_row_stride": words(case.query, 0),
            "query_head_stride": words(case.query, 1),
            "out_row_stride": words(out, 0),
            "out_head_stride": words(out, 1),
            "block_stride": words(case.kv_cache, 0),
            "head_stride": words(case.kv_cache, 1),
            "token_stride": words(case.kv_cache, 2),
            "table_stride": tables.max_blocks,
            "num_trees": trees,
            "kv_heads": kv_heads,
            "group": group,
            "block_size": block_size,
            "mask_rows": tables.max_rows,
            "mask_words": tables.mask_words,
            "row_tiles": row_tiles,
            "splits": splits,
            "scale": case.scale / case.softcap if case.softcap else case.scale * math.log2(math.e),
            "softcap": (case.softcap or 0.0) * math.log2(math.e),
        }
        self.launch(kernel, values)
        if splits > 1:
            self.launch(self.find("combine", dtype, head_dim), values)
        return out

    def compact(self, cache: Tensor, source: Sequence[int], target: Sequence[int]) -> None:
        """compact_kv on one layer's cache, in place."""
        values: dict[str, Tensor | int | float] = {
            "cache": cache,
            "source": torch.tensor(source, dtype=torch.int32),
            "target": torch.tensor(target, dtype=torch.int32),
            "block_stride": words(cache, 0),
            "head_stride": words(cache, 1),
            "token_stride": words(cache, 2),
            "kv_heads": cache.shape[1],
            "block_size": cache.shape[2],
            "token_words": cache.shape[3] * cache.element_size() // 4,
            "num_moves": len(source),
        }
        self.launch(self.find("compact_kv", "uint32"), values)


def words(tensor: Tensor, dim: int) -> int:
    """Stride of `dim` in uint32 words."""
    size = tensor.stride(dim) * tensor.element_size()
    assert size % 4 == 0
    return size // 4


def memory(tensor: Tensor) -> Tensor:
    """uint8: a view of all memory from the tensor's first element to its storage's end."""
    start = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(), start, (tensor.untyped_storage().nbytes() - start,), (1,)
    )
