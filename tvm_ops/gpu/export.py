"""Kernels as files for programs outside this project, described for a manifest.

Imports TVM's compiler: run it in a child process, as tvm_ops/compile.py says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tvm_ops.artifact import KernelSpec
from tvm_ops.gpu.compile import compile_cuda, write_modules
from tvm_ops.gpu.entries import Argument, EntryPoint, entry_point
from tvm_ops.gpu.program import Kernel, Program
from tvm_ops.gpu.targets import GpuTarget

# Blocks in x and y, in terms of the arguments; what is none of them is in "sizes".
_GRIDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "tree_attention": ("row_tiles * splits", "num_trees * kv_heads"),
        "combine": ("row_tiles * {row_blocks}", "num_trees * kv_heads"),
        "compact_kv": ("kv_heads", "1"),
    }
)
_CUDA_COMPACT_GRID = ("kv_heads", "num_layers")
_SHAPES: Mapping[str, str] = MappingProxyType(
    {
        "query": "{dtype} [rows of all trees and others, kv_heads * group, {head_dim}], strides "
        "query_row_stride and query_head_stride in uint32 words, last dimension contiguous",
        "out": "as query, with strides out_row_stride and out_head_stride",
        "cache": "{dtype} [num_blocks, kv_heads, block_size, 2 * head_dim], key then value of a "
        "token contiguous, strides block_stride, head_stride and token_stride in uint32 words",
        "trees": "[num_trees, 8]: first row in query, rows, context tokens, smallest and largest "
        "first_visible of the tree's rows, unused; a tree of 0 rows is skipped",
        "masks": "[num_trees, mask_rows, mask_words]: bit j % 32 of word j // 32 is set if the row "
        "sees row j of its tree; beyond the tree's rows clear",
        "first_visible": "[num_trees, mask_rows]: first context token that the row sees",
        "table": "[num_trees, table_stride]: blocks of the cache, in order",
        "partial": "[num_trees * kv_heads, row_tiles, splits, {rows}, {head_dim} + 2]; unused, but "
        "bound, if splits is 1",
        "caches": "[num_layers]: addresses of caches as for tree_attention",
        "source": "[num_moves]: slot block * block_size + offset to copy from, -1 for no move",
        "target": "[num_moves]: slot to copy to; moves are made one after the other",
        "scale": "factor of the logits, with log2(e) for base 2, or with 1 / cap if capped",
        "softcap": "cap * log2(e), or 0 for none",
        "token_words": "uint32 words of a token's key and value",
        "packGridDimX": "blocks in x, minus 1",
        "row_tiles": "ceil(rows of the largest tree * group / {rows})",
        "splits": "parts of the keys, any number of at least 1; above 1 combine has to follow",
    }
)


def export(spec: KernelSpec, target: GpuTarget, out: Path) -> list[dict[str, Any]]:
    """Write the kernels of `spec` into the directory `out`; what a manifest says of each.

    Raises RuntimeError when a compiler is missing or fails, OSError if `out` can't be written.
    """
    if target.kind == "cuda":
        program = compile_cuda(spec, target)
        path = out / f"{spec.stem}{target.suffix}"
        path.write_bytes(program.code)
        return [
            _about(spec, target, path, *_cuda_entry(kernel, program)) for kernel in program.kernels
        ]
    entries = []
    for name, source in write_modules(spec, target).items():
        path = out / f"{name}{spec.stem.removeprefix(spec.op)}{target.suffix}"
        path.write_text(source.text)
        entry = entry_point(source.text, target.kind)
        entries.append(_about(spec, target, path, name, entry, source.threads[name], source.tile))
    return entries


def _cuda_entry(kernel: Kernel, program: Program) -> tuple[str, EntryPoint, int, dict[str, int]]:
    arguments = tuple(Argument(n, kind, i) for i, (n, kind) in enumerate(kernel.arguments))
    tile = {"rows": program.rows, "keys": program.keys, "combine_rows": program.combine_rows}
    tile = tile if program.rows else {}
    return kernel.name, EntryPoint(f"{kernel.name}_kernel", arguments), kernel.threads, tile


def _about(
    spec: KernelSpec,
    target: GpuTarget,
    path: Path,
    name: str,
    entry: EntryPoint,
    threads: int,
    tile: dict[str, int],
) -> dict[str, Any]:
    grid = _GRIDS[name]
    if name == "compact_kv" and target.kind == "cuda":
        grid = _CUDA_COMPACT_GRID
    numbers = {"dtype": spec.dtype, "head_dim": spec.head_dim, "rows": tile.get("rows")}
    if tile:
        numbers["row_blocks"] = tile["rows"] // tile["combine_rows"]
    return {
        "kernel": name,
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "entry": entry.name,
        "layouts": ["strided"],
        "dtype": spec.dtype,
        **({"head_dim": spec.head_dim} if spec.head_dim else {}),
        **({"tile": tile} if tile else {}),
        "threads": threads,
        "grid": [size.format(**numbers) for size in grid],
        "arguments": [_argument(argument, target, numbers) for argument in entry.arguments],
    }


_PLACES = {"opencl": "index", "cuda": "index", "metal": "buffer", "webgpu": "binding"}


def _argument(argument: Argument, target: GpuTarget, numbers: dict[str, Any]) -> dict[str, Any]:
    about: dict[str, Any] = {"name": argument.name, "kind": argument.kind}
    about[_PLACES[target.kind]] = argument.place
    if argument.offset is not None:
        about["offset"] = argument.offset
    if argument.elements is not None:
        about["elements"] = argument.elements
    if argument.name in _SHAPES:
        about["meaning"] = _SHAPES[argument.name].format(**numbers)
    return about
