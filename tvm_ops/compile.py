"""Compile kernels into the kernel cache: `python -m tvm_ops.compile OP:MEMORY:DTYPE:HEAD_DIM ...`.

With tvm_ops/kernels the only place that imports TVM's compiler. Serving processes run it as a
child process, so that TVM's LLVM never shares a process with theirs.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tvm_ops.artifact import PACKAGE, KernelSpec, artifact_path, host_target

logger = logging.getLogger(__name__)


def compile_missing(specs: Sequence[KernelSpec]) -> list[Path]:
    """Compile those of `specs` that the kernel cache lacks; return the paths of all.

    Safe to run in several processes at once: one compiles, the others wait for its file.
    Raises RuntimeError when the C compiler or TVM is missing, or when either fails.
    """
    paths = []
    for spec in specs:
        path = artifact_path(spec)
        paths.append(path)
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            if path.exists():
                continue
            begin = time.perf_counter()
            temporary = path.with_name(f".{os.getpid()}-{path.name}")
            try:
                _build(spec, temporary)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            logger.info("compiled %s in %.1f s", path.name, time.perf_counter() - begin)
    return paths


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(spec: KernelSpec, path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError(
            "no C compiler: compiling kernels needs `gcc` or `cc` on PATH; install one, or copy "
            "the kernel cache from a machine of the same kind"
        )
    if spec.op == "launcher":
        source = PACKAGE / "launcher.c"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(path), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{compiler} failed on {source.name}:\n{done.stderr}")
        return
    try:
        import tvm
    except ImportError as error:
        raise RuntimeError(
            f"compiling {spec} needs TVM's compiler, which does not import ({error}); install "
            "apache-tvm, or copy the kernel cache from a machine of the same kind"
        ) from error
    module = tvm.IRModule({spec.op: _kernel(spec)})
    executable = tvm.compile(module, target=tvm.target.Target(host_target()))
    executable.export_library(str(path), cc=compiler)


def _kernel(spec: KernelSpec) -> Any:
    from tvm_ops.kernels.compact_kv import compact_kv_kernel
    from tvm_ops.kernels.schedules import schedule_for
    from tvm_ops.kernels.tree_attention import tree_attention_kernel

    if spec.op == "compact_kv":
        return compact_kv_kernel(spec.memory, spec.dtype)
    schedule = schedule_for(host_target()["mcpu"])
    return tree_attention_kernel(spec.memory, spec.dtype, spec.head_dim, schedule)


def main(arguments: Sequence[str]) -> int:
    """Compile the named kernels; print their paths."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        for path in compile_missing([KernelSpec.parse(text) for text in arguments]):
            print(path)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
