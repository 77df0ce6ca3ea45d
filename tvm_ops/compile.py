"""Compile kernels into the kernel cache, or with --out into a directory.

With tvm_ops/kernels the only place that imports TVM's compiler. Serving processes run it as a child
process, `python -m tvm_ops.compile OP:MEMORY:DTYPE:HEAD_DIM ...`, so that TVM's LLVM never shares a
process with theirs.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_ops.artifact import (
    PACKAGE,
    KernelSpec,
    artifact_path,
    is_intact,
    sealed,
    serving_target,
)
from tvm_ops.gpu.targets import GPU_TARGETS, GpuTarget
from tvm_ops.targets import CpuTarget, find_target

logger = logging.getLogger(__name__)


def compile_missing(
    specs: Sequence[KernelSpec], target: CpuTarget | GpuTarget | None = None
) -> list[Path]:
    """Compile those of `specs` that the kernel cache lacks; return the paths of all.

    Safe to run in several processes at once: one compiles, the others wait for its file.
    Raises RuntimeError when the C compiler or TVM is missing, when either fails, or when the cache
    can't be written.
    """
    paths = []
    for spec in specs:
        chosen = serving_target(spec) if target is None else target
        path = artifact_path(spec, chosen)
        paths.append(path)
        if not is_intact(path):
            _compile_into(path, spec, chosen)
    return paths


@dataclass(frozen=True)
class Library:
    """A shared library, and name and kind of each argument of its kernel."""

    content: bytes
    arguments: list[dict[str, str]]


def build_library(spec: KernelSpec, target: CpuTarget) -> Library:
    """Compile and link `spec`.

    Raises RuntimeError when the C compiler or TVM is missing, or when either fails.
    """
    compiler = find_compiler(target)
    with tempfile.TemporaryDirectory(prefix="tvm_ops-") as directory:
        path = Path(directory) / f"{spec.op}.so"
        if spec.op == "launcher":
            _compile_launcher(compiler, path)
            arguments = []
        else:
            arguments = _compile_kernel(spec, target, compiler, path)
        return Library(path.read_bytes(), arguments)


def find_compiler(target: CpuTarget) -> str:
    """Path of a C compiler that links for `target`. Raises RuntimeError if there is none."""
    for name in target.compilers:
        found = shutil.which(name)
        if found is not None:
            return found
    wanted = " or ".join(f"`{name}`" for name in target.compilers)
    remedy = (
        "install one, or copy the kernel cache from a machine of the same kind"
        if target.native
        else "it links for another kind of machine"
    )
    raise RuntimeError(
        f"no C compiler: kernels for {target.name} need {wanted} on PATH; {remedy} "
        f"(Debian: apt-get install {target.compiler_package})"
    )


def _compile_into(path: Path, spec: KernelSpec, target: CpuTarget | GpuTarget) -> None:
    with _lock(path):
        if is_intact(path):
            return
        if path.exists():
            logger.warning("%s is damaged: compiling it again", path)
        begin = time.perf_counter()
        if isinstance(target, GpuTarget):
            from tvm_ops.gpu.compile import compile_cuda

            content = compile_cuda(spec, target).packed()
        else:
            content = build_library(spec, target).content
        temporary = path.with_name(f".{os.getpid()}-{path.name}")
        with _cache_errors(path.parent):
            try:
                temporary.write_bytes(sealed(content))
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        logger.info("compiled %s in %.1f s", path.name, time.perf_counter() - begin)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with _cache_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _cache_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"the kernel cache {directory} can't be written ({error}): make room or make it "
            "writable, or set MEDUSA_CACHE to a directory that is"
        ) from error


def _compile_launcher(compiler: str, path: Path) -> None:
    source = PACKAGE / "launcher.c"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{compiler} failed on {source.name}:\n{done.stderr}")


@contextmanager
def missing_compiler_explained(spec: KernelSpec) -> Iterator[None]:
    """Inside, an import of TVM that fails raises RuntimeError with the remedy."""
    try:
        yield
    except ImportError as error:
        raise RuntimeError(
            f"compiling {spec} needs TVM's compiler, which does not import ({error}); install "
            "apache-tvm, or copy the kernel cache from a machine of the same kind"
        ) from error


def _compile_kernel(
    spec: KernelSpec, target: CpuTarget, compiler: str, path: Path
) -> list[dict[str, str]]:
    with missing_compiler_explained(spec):
        import tvm
    function = _kernel(spec, target)
    module = tvm.IRModule({spec.op: function})
    executable = tvm.compile(module, target=tvm.target.Target(target.llvm))
    executable.export_library(str(path), cc=compiler)
    return [_argument(parameter) for parameter in function.params]


def _argument(parameter: Any) -> dict[str, str]:
    kind = str(parameter.ty.dtype)
    if hasattr(parameter.ty, "shape"):
        sizes = [str(getattr(size, "value", size)) for size in parameter.ty.shape]
        kind = f"{kind} tensor [{', '.join(sizes)}]"
    return {"name": str(parameter.name), "kind": kind}


def _kernel(spec: KernelSpec, target: CpuTarget) -> Any:
    from tvm_ops.kernels.amx_attention import amx_attention_kernel
    from tvm_ops.kernels.compact_kv import compact_kv_kernel
    from tvm_ops.kernels.schedules import schedule_for
    from tvm_ops.kernels.tree_attention import tree_attention_kernel

    if spec.op == "compact_kv":
        return compact_kv_kernel(spec.memory, spec.dtype)
    if spec.memory == "amx" and target.amx:
        return amx_attention_kernel(spec.head_dim)
    schedule = schedule_for(target.mcpu)
    return tree_attention_kernel(spec.memory, spec.dtype, spec.head_dim, schedule)


def _export(spec: KernelSpec, target: CpuTarget | GpuTarget, out: Path) -> dict[str, Any]:
    if isinstance(target, GpuTarget):
        from tvm_ops.gpu.export import export

        return {"kernels": export(spec, target, out)}
    library = build_library(spec, target)
    (out / f"{spec.stem}.so").write_bytes(library.content)
    return {"arguments": library.arguments}


def main(arguments: Sequence[str]) -> int:
    """Compile the named kernels; print each path, or with --out a line of JSON, when it is done."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="python -m tvm_ops.compile", description=__doc__)
    parser.add_argument("--target", help="processor to compile for; default: this machine's")
    parser.add_argument("--out", type=Path, help="directory for plain libraries")
    parser.add_argument("kernels", nargs="+", metavar="OP:MEMORY:DTYPE:HEAD_DIM")
    options = parser.parse_args(arguments)
    try:
        specs = [KernelSpec.parse(text) for text in options.kernels]
        target = find_target(options.target)
        if options.out is None and target.name in set(GPU_TARGETS) - {"cuda"}:
            raise ValueError(f"kernels for {target.name} are not run from here: give --out")
        for spec in specs:
            if options.out is None:
                print(*compile_missing([spec], target), flush=True)
            else:
                print(json.dumps(_export(spec, target, options.out)), flush=True)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
