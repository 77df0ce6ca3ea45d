"""Find, compile if missing, and load kernels. Needs tvm-ffi at run time, never TVM itself."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tvm_ops.artifact import PACKAGE, KernelSpec, artifact_path
from tvm_ops.layouts import DTYPE_NAMES, find_layout
from tvm_ops.openmp import bind_launcher

logger = logging.getLogger(__name__)

_LAUNCHER = KernelSpec("launcher")
_lock = threading.RLock()
_loaded: dict[KernelSpec, tuple[Callable[..., Any], Path]] = {}
_launcher_bound = False


def kernel(spec: KernelSpec) -> Callable[..., Any]:
    """The compiled function of `spec`, compiled and loaded on first use.

    Raises RuntimeError when it has to be compiled and can't be.
    """
    found = _loaded.get(spec)
    return found[0] if found is not None else _load(spec)


def loaded_artifacts() -> Mapping[KernelSpec, Path]:
    """Kernels loaded in this process and the files they came from."""
    return MappingProxyType({spec: path for spec, (_, path) in _loaded.items()})


def warm_up(layout: str, dtype: torch.dtype, head_dim: int) -> None:
    """Compile, if missing, and load all kernels for one cache layout, element type and head_dim.

    Compiling takes seconds, in one child process. Raises ValueError for an unknown layout,
    TypeError for a dtype the layout can't hold, RuntimeError when compiling fails.
    """
    specs = [attention_spec(layout, dtype, head_dim), compact_spec(layout, dtype)]
    ensure_compiled(specs)
    for spec in specs:
        kernel(spec)


@functools.cache
def attention_spec(layout: str, dtype: torch.dtype, head_dim: int) -> KernelSpec:
    """Key of the tree_attention kernel; raises as warm_up does."""
    kind = find_layout(layout)
    if dtype not in kind.dtypes:
        raise TypeError(f"layout {layout!r} holds {[str(d) for d in kind.dtypes]}, got {dtype}")
    if head_dim < 16 or head_dim % 16:
        raise ValueError(f"expected a head_dim divisible by 16, got {head_dim}")
    return KernelSpec("tree_attention", kind.memory, DTYPE_NAMES[dtype], head_dim)


def compact_spec(layout: str, dtype: torch.dtype) -> KernelSpec:
    """Key of the compact_kv kernel, which only moves bits; raises as warm_up does."""
    kind = find_layout(layout)
    if dtype not in kind.dtypes:
        raise TypeError(f"layout {layout!r} holds {[str(d) for d in kind.dtypes]}, got {dtype}")
    return KernelSpec("compact_kv", kind.memory, f"uint{8 * dtype.itemsize}")


def ensure_compiled(specs: Sequence[KernelSpec]) -> None:
    """Compile missing kernels in a child process. Raises RuntimeError with its message."""
    missing = [spec for spec in (_LAUNCHER, *specs) if not artifact_path(spec).exists()]
    if not missing:
        return
    logger.info("compiling %s, once per machine", ", ".join(map(str, missing)))
    begin = time.perf_counter()
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    search = [str(PACKAGE.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, search))
    done = subprocess.run(
        [sys.executable, "-m", "tvm_ops.compile", *map(str, missing)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"compiling {', '.join(map(str, missing))} failed (exit status {done.returncode}):\n"
            f"{done.stderr.strip()}"
        )
    logger.info("compiled %d kernels in %.1f s", len(missing), time.perf_counter() - begin)


def _load(spec: KernelSpec) -> Callable[..., Any]:
    import tvm_ffi

    global _launcher_bound
    with _lock:
        if spec in _loaded:
            return _loaded[spec][0]
        ensure_compiled([spec])
        if not _launcher_bound:
            # Kernels crash at load time unless the launcher's symbols are registered first.
            bind_launcher(artifact_path(_LAUNCHER))
            _launcher_bound = True
        path = artifact_path(spec)
        function: Callable[..., Any] = tvm_ffi.load_module(str(path))[spec.op]
        _loaded[spec] = (function, path)
        return function
