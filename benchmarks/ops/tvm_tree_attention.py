"""Compile TVM's own tree_attn_cpu, for bench_ops.py, which runs this file as a child process.

python benchmarks/ops/tvm_tree_attention.py DIRECTORY KV_HEADS:HEADS:HEAD_DIM ...

TVM's compiler must not share a process with torch's LLVM: only the libraries leave this one. They
are built for the processor that tvm_ops compiles its own kernels for.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tvm
from tvm.relax.frontend.nn.llm.tree_attn import tree_attn_cpu

from tvm_ops.targets import host_target


def main(directory: Path, variants: list[str]) -> None:
    target = tvm.target.Target(host_target().llvm)
    for variant in variants:
        kv_heads, heads, head_dim = map(int, variant.split(":"))
        # Plain RoPE compiled in, as in MLC, and switched off by an argument of the call.
        function = tree_attn_cpu(kv_heads, heads, head_dim, "float32", {})
        function = function.with_attr("global_symbol", "tree_attn_cpu")
        executable = tvm.compile(tvm.IRModule({"tree_attn_cpu": function}), target=target)
        executable.export_library(str(directory / f"{variant.replace(':', '-')}.so"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
