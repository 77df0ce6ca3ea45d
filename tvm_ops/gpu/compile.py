"""Compile the GPU kernels: TVM writes the source of each language, nvcc makes CUDA's binary.

Imports TVM's compiler: run it in a child process, as tvm_ops/compile.py says.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_ops.artifact import KernelSpec
from tvm_ops.compile import missing_compiler_explained
from tvm_ops.gpu.entries import c_arguments
from tvm_ops.gpu.program import Kernel, Program
from tvm_ops.gpu.targets import GpuTarget

_CUDA_ENTRY = re.compile(r'extern "C" __global__ void .*?(\w+)_kernel\(([^)]*)\) \{')


@dataclass(frozen=True)
class Source:
    """Source text of all kernels of one spec, and the threads of a block of each.

    tile: rows, keys and combine_rows of Program.
    """

    text: str
    threads: dict[str, int]
    tile: dict[str, int]


def write_source(spec: KernelSpec, target: GpuTarget) -> Source:
    """Have TVM write the kernels of `spec` in the target's language, as one text.

    Raises RuntimeError when TVM is missing.
    """
    functions, tile = _functions(spec, target)
    text = _write({name: function for name, (function, _) in functions.items()}, target)
    return Source(text, {name: threads for name, (_, threads) in functions.items()}, tile)


def write_modules(spec: KernelSpec, target: GpuTarget) -> dict[str, Source]:
    """As write_source, one text for each kernel.

    Metal and WebGPU need this: TVM gives the declarations of all kernels the same names.
    """
    functions, tile = _functions(spec, target)
    return {
        name: Source(_write({name: function}, target), {name: threads}, tile)
        for name, (function, threads) in functions.items()
    }


def _write(functions: dict[str, Any], target: GpuTarget) -> str:
    import tvm

    executable = tvm.compile(tvm.IRModule(functions), target=tvm.target.Target(_tvm_target(target)))
    return str(executable.mod.imports[0].inspect_source())


def _tvm_target(target: GpuTarget) -> dict[str, Any]:
    wanted: dict[str, Any] = {"kind": target.kind, "host": {"kind": "llvm"}}
    if target.architectures:
        # The oldest: the kernels use nothing newer, and nvcc compiles the source for each.
        wanted["arch"] = f"sm_{min(target.architectures)}"
    return wanted


def _functions(
    spec: KernelSpec, target: GpuTarget
) -> tuple[dict[str, tuple[Any, int]], dict[str, int]]:
    with missing_compiler_explained(spec):
        from tvm_ops.kernels import (
            gpu_compact_kv,
            gpu_mma_attention,
            gpu_mma_ops,
            gpu_tree_attention,
        )

    if spec.op == "compact_kv":
        if target.kind == "cuda":
            compact = gpu_compact_kv.compact_kv_all_kernel()
        else:
            compact = gpu_compact_kv.compact_kv_layer_kernel(target.index)
        return {"compact_kv": (compact, gpu_compact_kv.COMPACT_THREADS)}, {}
    d, dtype = spec.head_dim, spec.dtype
    tile = gpu_mma_ops.mma_tile(d)
    if target.tensor_cores and dtype != "float32" and tile is not None:
        attention = gpu_mma_attention.tree_attention_mma_kernel(dtype, d)
        rows, keys, threads = tile.rows, tile.keys, tile.threads
    else:
        attention = gpu_tree_attention.tree_attention_simt_kernel(dtype, d, target.index)
        rows, keys = gpu_tree_attention.SIMT_ROWS, gpu_tree_attention.SIMT_KEYS
        threads = gpu_tree_attention.SIMT_THREADS
    combine = gpu_tree_attention.combine_kernel(dtype, d, rows, keys, target.index)
    functions = {
        "tree_attention": (attention, threads),
        "combine": (combine, gpu_tree_attention.COMBINE_THREADS),
    }
    combine_rows = gpu_tree_attention.COMBINE_ROWS
    return functions, {"rows": rows, "keys": keys, "combine_rows": combine_rows}


def cuda_kernels(source: Source) -> tuple[Kernel, ...]:
    """The entry points of CUDA source; TVM sorts their arguments, so the text is asked."""
    found = []
    for match in _CUDA_ENTRY.finditer(source.text):
        arguments = tuple((a.name, a.kind) for a in c_arguments(match[2]))
        found.append(Kernel(match[1], arguments, source.threads[match[1]]))
    names = [kernel.name for kernel in found]
    if sorted(names) != sorted(source.threads):
        raise RuntimeError(f"expected kernels {list(source.threads)} in TVM's source, got {names}")
    return tuple(found)


def compile_cuda(spec: KernelSpec, target: GpuTarget) -> Program:
    """A fat binary for all architectures of `target` that nvcc knows, and PTX for later ones.

    Raises RuntimeError when TVM or nvcc is missing or fails.
    """
    source = write_source(spec, target)
    nvcc = find_nvcc()
    known = nvcc_architectures(nvcc)
    chosen = [a for a in target.architectures if a in known]
    if not chosen:
        raise RuntimeError(
            f"{nvcc} knows none of {', '.join(f'sm_{a}' for a in target.architectures)}: install "
            "a CUDA toolkit that does"
        )
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in chosen]
    flags.append(f"-gencode=arch=compute_{chosen[-1]},code=compute_{chosen[-1]}")
    code, _ = run_nvcc(nvcc, source.text, ["-fatbin", *flags])
    return Program(code, cuda_kernels(source), **source.tile)


def run_nvcc(nvcc: str, source: str, flags: list[str]) -> tuple[bytes, str]:
    """What nvcc makes of `source`, and its messages. Raises RuntimeError with them if it fails."""
    with tempfile.TemporaryDirectory(prefix="tvm_ops-") as directory:
        text, output = Path(directory) / "kernels.cu", Path(directory) / "kernels.bin"
        text.write_text(source)
        command = [nvcc, "-O3", *flags, "-o", str(output), str(text)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc failed:\n{done.stderr.strip()}")
        return output.read_bytes(), done.stdout + done.stderr


def find_nvcc() -> str:
    """Path of nvcc, on PATH or under CUDA_HOME. Raises RuntimeError if there is none."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [str(Path(home) / "bin") for home in homes if home]
    found = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(places))
    if found is None:
        raise RuntimeError(
            "no nvcc on PATH or in $CUDA_HOME/bin: install the CUDA toolkit, or copy kernels built "
            "elsewhere with: python -m tvm_ops.build --target cuda --out DIR"
        )
    return found


def nvcc_architectures(nvcc: str) -> set[int]:
    """Compute capabilities, e.g. 90, that this nvcc compiles for."""
    done = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    return {int(number) for number in re.findall(r"compute_(\d+)\b", done.stdout)}
