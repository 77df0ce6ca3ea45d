"""What can be compiled, for which CPU, and the file in the kernel cache that holds it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent
TARGET_VARIABLE = "MEDUSA_KERNEL_TARGET"
OPS = ("tree_attention", "compact_kv", "launcher")

# x86-64 psABI levels, best first, with the flags that tell them apart in /proc/cpuinfo.
_X86_LEVELS = (
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("x86-64-v3", {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"}),
    ("x86-64", set[str]()),
)
_TARGET_NAMES = (*(name for name, _ in _X86_LEVELS), "generic")


@dataclass(frozen=True)
class KernelSpec:
    """One compiled library: an op and what it is specialised on.

    tree_attention: layout memory ("vec", "amx"), dtype, head_dim. compact_kv: layout memory, dtype.
    launcher: nothing. Unused fields keep their defaults.
    """

    op: str
    memory: str = ""
    dtype: str = ""
    head_dim: int = 0

    def __str__(self) -> str:
        return ":".join([self.op, self.memory, self.dtype, str(self.head_dim)])

    @classmethod
    def parse(cls, text: str) -> KernelSpec:
        """Inverse of str(); raises ValueError for anything else."""
        parts = text.split(":")
        if len(parts) != 4 or parts[0] not in OPS or not parts[3].isdigit():
            raise ValueError(
                f"not a kernel: {text!r}; expected OP:MEMORY:DTYPE:HEAD_DIM with OP one of {OPS}"
            )
        return cls(parts[0], parts[1], parts[2], int(parts[3]))


def cpu_target(machine: str, flags: Iterable[str]) -> dict[str, str]:
    """TVM target for a machine (platform.machine()) with these /proc/cpuinfo flags."""
    if machine in ("x86_64", "AMD64"):
        have = set(flags)
        level = next(name for name, needed in _X86_LEVELS if needed <= have)
        return {"kind": "llvm", "mcpu": level}
    if machine == "aarch64":
        return {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "generic"}
    raise ValueError(f"no kernels for machine {machine!r}: expected x86_64 or aarch64")


def host_target() -> dict[str, str]:
    """Target of this machine, or the level named by MEDUSA_KERNEL_TARGET.

    Raises ValueError for an unknown level.
    """
    forced = os.environ.get(TARGET_VARIABLE)
    if not forced:
        return _detected_target()
    if forced not in _TARGET_NAMES:
        raise ValueError(f"{TARGET_VARIABLE}={forced!r}: expected one of {_TARGET_NAMES}")
    return {"kind": "llvm", "mcpu": forced}


@functools.cache
def _detected_target() -> dict[str, str]:
    flags: list[str] = []
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                flags = value.split()
                break
    return cpu_target(platform.machine(), flags)


def cache_root() -> Path:
    """The user's cache: $MEDUSA_CACHE, by default ~/.cache/medusa."""
    root = os.environ.get("MEDUSA_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "medusa"


def cache_dir() -> Path:
    """Directory of compiled kernels."""
    return cache_root() / "kernels"


def artifact_path(spec: KernelSpec, target: Mapping[str, str] | None = None) -> Path:
    """File that holds `spec`, whether or not it exists yet.

    Its name carries a hash of the kernel sources and the target, and TVM's version. On a host
    without TVM's compiler, an artefact of any TVM version will do.
    """
    target = host_target() if target is None else target
    digest = hashlib.sha256()
    digest.update(json.dumps([str(spec), dict(target)], sort_keys=True).encode())
    digest.update(_source_digest(spec.op))
    stem = "-".join(filter(None, [spec.op, spec.memory, spec.dtype, str(spec.head_dim or "")]))
    name = f"{stem}-{digest.hexdigest()[:16]}"
    if spec.op == "launcher":
        return cache_dir() / f"{name}.so"
    try:
        version = importlib.metadata.version("apache-tvm")
    except importlib.metadata.PackageNotFoundError:
        built = sorted(cache_dir().glob(f"{name}-tvm*.so"))
        return built[-1] if built else cache_dir() / f"{name}-tvm.so"
    return cache_dir() / f"{name}-tvm{version}.so"


@functools.cache
def _source_digest(op: str) -> bytes:
    if op == "launcher":
        sources = [PACKAGE / "launcher.c"]
    else:
        sources = [PACKAGE / "compile.py", *sorted((PACKAGE / "kernels").glob("*.py"))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).digest()
