"""Compile the AMX kernel with calls to amx_emulation.c in place of tile instructions.

python -m tests.tvm_ops.emulated_amx EMULATION.so DIRECTORY HEAD_DIM ...

A process of its own, as TVM's compiler must not share one with torch. The target has no AMX: a tile
instruction that escapes the replacement can't be compiled.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tvm
from tvm.script import tirx as T

from tvm_ops.kernels import amx_tiles
from tvm_ops.kernels.amx_attention import amx_attention_kernel
from tvm_ops.targets import TARGETS


def main(emulation: str, directory: Path, head_dims: list[int]) -> None:
    amx_tiles.tile_instruction = lambda name, *arguments: T.call_extern(
        "void", f"emulated_{name}", *arguments
    )
    target = tvm.target.Target(TARGETS["x86-64-v4"].llvm)
    for head_dim in head_dims:
        module = tvm.IRModule({"tree_attention": amx_attention_kernel(head_dim)})
        executable = tvm.compile(module, target=target)
        options = ["-Wl,--no-as-needed", emulation]
        executable.export_library(str(directory / f"{head_dim}.so"), options=options)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(text) for text in sys.argv[3:]])
