"""Find, compile if missing, and load kernels. Needs tvm-ffi at run time, never TVM itself."""

from __future__ import annotations

import functools
import importlib.util
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

from tvm_ops.artifact import (
    PACKAGE,
    KernelSpec,
    artifact_path,
    cache_root,
    is_intact,
    serving_target,
)
from tvm_ops.layouts import DTYPE_NAMES, find_layout
from tvm_ops.openmp import bind_launcher
from tvm_ops.targets import REFERENCE, TARGET_VARIABLE

logger = logging.getLogger(__name__)

COMPILER = "apache-tvm>=0.27,<0.28"  # as in pyproject.toml

_LAUNCHER = KernelSpec("launcher")
_KERNELS_PER_CHILD = 3  # starting a compiler costs as much as compiling a kernel or two
_RUN_COMPILER = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from tvm_ops.compile import main; sys.exit(main(sys.argv[2:]))"
)
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


@functools.cache
def reference_requested() -> bool:
    """Whether MEDUSA_KERNEL_TARGET=reference replaces all kernels by their plain torch twins.

    Read once per process; never chosen because a kernel is missing.
    """
    requested = os.environ.get(TARGET_VARIABLE) == REFERENCE
    if requested:
        logger.warning(
            "%s=%s: the plain torch twins run instead of compiled kernels, much slower",
            TARGET_VARIABLE,
            REFERENCE,
        )
    return requested


def warm_up(layout: str, dtype: torch.dtype, head_dim: int) -> None:
    """Compile, if missing, and load all kernels for one cache layout, element type and head_dim.

    Compiling takes seconds, in one child process. Raises ValueError for an unknown layout,
    TypeError for a dtype the layout can't hold, RuntimeError when compiling fails.
    """
    specs = _all_specs(layout, dtype, head_dim)
    if reference_requested():
        return
    ensure_compiled(specs)
    for spec in specs:
        if spec.on_gpu:
            from tvm_ops.gpu.load import cuda_program

            cuda_program(spec, torch.device("cuda"))
        else:
            kernel(spec)


def start_warm_up(layout: str, dtype: torch.dtype, head_dim: int) -> None:
    """Begin what warm_up does in the background, which a later warm_up waits for.

    Raises for its arguments as warm_up does; what goes wrong in the background, that warm_up
    raises.
    """
    specs = _all_specs(layout, dtype, head_dim)
    if not reference_requested():
        with _lock:
            _start(_missing(specs))


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
    bits = 32 if kind.strided else 8 * dtype.itemsize
    return KernelSpec("compact_kv", kind.memory, f"uint{bits}")


def ensure_compiled(specs: Sequence[KernelSpec]) -> None:
    """Compile missing kernels in a child process. Raises RuntimeError with its message."""
    with _lock:
        missing = _missing(specs)
        if not missing:
            return
        begin = time.perf_counter()
        _start(missing)
        for child in {_children[spec] for spec in missing}:
            child.wait()
        logger.info("waited %.1f s for %d kernels", time.perf_counter() - begin, len(missing))


def compiler_command() -> list[str]:
    """Command that runs tvm_ops.compile where TVM is: here, or in $MEDUSA_CACHE/tvm.

    vLLM's CUDA packages pin an older apache-tvm-ffi than TVM needs, so the two can't share an
    environment. Raises RuntimeError when neither has it.
    """
    environment = cache_root() / "tvm"
    if importlib.util.find_spec("tvm") is not None:
        python = [sys.executable]
    elif (environment / "bin" / "python").exists():
        # Isolated: what is beside this process's packages must not stand in for the compiler's.
        python = [str(environment / "bin" / "python"), "-I"]
    else:
        raise RuntimeError(
            "compiling kernels needs TVM's compiler, which neither this environment has nor "
            f"{environment}. Install it there, beside vLLM and without touching it: "
            f"python -m venv {environment} && {environment}/bin/pip install '{COMPILER}'"
        )
    return [*python, "-c", _RUN_COMPILER, str(PACKAGE.parent)]


class _Child:
    """A process that compiles `specs`, all for the CPU or all for the GPU."""

    def __init__(self, specs: Sequence[KernelSpec]) -> None:
        self.names = ", ".join(map(str, specs))
        self.specs = tuple(specs)
        logger.info("compiling %s, once per machine", self.names)
        environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        # Named: a child may be granted AMX where this process was not.
        target = serving_target(specs[0]).name
        self.process = subprocess.Popen(
            [*compiler_command(), "--target", target, *map(str, specs)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def wait(self) -> None:
        """Forget the process when it is done; raise RuntimeError if it failed."""
        _, messages = self.process.communicate()
        for spec in self.specs:
            if _children.get(spec) is self:
                del _children[spec]
        if self.process.returncode:
            raise RuntimeError(
                f"compiling {self.names} failed (exit status {self.process.returncode}):\n"
                f"{messages.strip()}"
            )


_children: dict[KernelSpec, _Child] = {}


def _all_specs(layout: str, dtype: torch.dtype, head_dim: int) -> list[KernelSpec]:
    return [attention_spec(layout, dtype, head_dim), compact_spec(layout, dtype)]


def _missing(specs: Sequence[KernelSpec]) -> list[KernelSpec]:
    on_cpu = [_LAUNCHER] if any(not spec.on_gpu for spec in specs) else []
    paths = {spec: artifact_path(spec) for spec in (*on_cpu, *specs)}
    missing = [spec for spec, path in paths.items() if not is_intact(path)]
    for spec in missing:
        if spec not in _children and paths[spec].exists():
            logger.warning("%s is damaged: compiling it again", paths[spec])
    return missing


def _start(specs: Sequence[KernelSpec]) -> None:
    """Have each of `specs` compiled by a child, a new one where none is at work."""
    # The file of a child that succeeded may have been removed since.
    idle = [s for s in specs if s not in _children or _children[s].process.poll() == 0]
    for on_gpu in (False, True):
        wanted = [spec for spec in idle if spec.on_gpu == on_gpu]
        share = -(-len(wanted) // len(os.sched_getaffinity(0)))
        count = -(-len(wanted) // max(share, _KERNELS_PER_CHILD)) if wanted else 0
        for i in range(count):
            mine = wanted[i::count]
            _children.update(dict.fromkeys(mine, _Child(mine)))


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
        path = artifact_path(spec)  # of a target that is known to run here, AMX permitted
        function: Callable[..., Any] = tvm_ffi.load_module(str(path))[spec.op]
        _loaded[spec] = (function, path)
        return function
