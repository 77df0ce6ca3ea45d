"""What can be compiled, and the file in the kernel cache that holds it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from dataclasses import dataclass
from pathlib import Path

from tvm_ops.gpu.targets import GPU_TARGETS, GpuTarget
from tvm_ops.targets import CpuTarget, host_target

PACKAGE = Path(__file__).parent
OPS = ("tree_attention", "compact_kv", "launcher")
GPU_MEMORY = "strided"  # the layout memory of graphics processors
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class KernelSpec:
    """One compiled library: an op and what it is specialised on.

    tree_attention: layout memory ("vec", "amx", "strided"), dtype, head_dim. compact_kv: layout
    memory, dtype. launcher: nothing. Unused fields keep their defaults.
    """

    op: str
    memory: str = ""
    dtype: str = ""
    head_dim: int = 0

    def __str__(self) -> str:
        return ":".join([self.op, self.memory, self.dtype, str(self.head_dim)])

    @property
    def on_gpu(self) -> bool:
        """Whether it is for a graphics processor."""
        return self.memory == GPU_MEMORY

    @property
    def stem(self) -> str:
        """File name without what tells versions apart."""
        parts = [self.op, self.memory, self.dtype, str(self.head_dim or "")]
        return "-".join(filter(None, parts))

    @classmethod
    def parse(cls, text: str) -> KernelSpec:
        """Inverse of str(); raises ValueError for anything else."""
        parts = text.split(":")
        if len(parts) != 4 or parts[0] not in OPS or not parts[3].isdigit():
            raise ValueError(
                f"not a kernel: {text!r}; expected OP:MEMORY:DTYPE:HEAD_DIM with OP one of {OPS}"
            )
        return cls(parts[0], parts[1], parts[2], int(parts[3]))


def cache_root() -> Path:
    """The user's cache: $MEDUSA_CACHE, by default ~/.cache/medusa."""
    root = os.environ.get("MEDUSA_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "medusa"


def cache_dir() -> Path:
    """Directory of compiled kernels."""
    return cache_root() / "kernels"


def serving_target(spec: KernelSpec) -> CpuTarget | GpuTarget:
    """The target that this machine runs `spec` on; raises as host_target does."""
    return GPU_TARGETS["cuda"] if spec.on_gpu else host_target()


def artifact_path(spec: KernelSpec, target: CpuTarget | GpuTarget | None = None) -> Path:
    """File that holds `spec`, whether or not it exists yet.

    Its name carries a hash of the kernel sources and the target, and TVM's version. On a host
    without TVM's compiler, an artefact of any TVM version will do.
    """
    target = serving_target(spec) if target is None else target
    digest = hashlib.sha256()
    digest.update(json.dumps([str(spec), target.identity], sort_keys=True).encode())
    digest.update(source_digest(spec.op, spec.on_gpu))
    name = f"{spec.stem}-{digest.hexdigest()[:16]}"
    if spec.op == "launcher":
        return cache_dir() / f"{name}.so"
    try:
        version = importlib.metadata.version("apache-tvm")
    except importlib.metadata.PackageNotFoundError:
        built = sorted(cache_dir().glob(f"{name}-tvm*{target.suffix}"))
        return built[-1] if built else cache_dir() / f"{name}-tvm{target.suffix}"
    return cache_dir() / f"{name}-tvm{version}{target.suffix}"


@functools.cache
def source_digest(op: str, on_gpu: bool = False) -> bytes:
    """Hash of the sources that an op's library is made of."""
    if op == "launcher":
        sources = [PACKAGE / "launcher.c"]
    else:
        kernels = sorted((PACKAGE / "kernels").glob("*.py"))
        sources = [path for path in kernels if path.name.startswith("gpu_") == on_gpu]
        if on_gpu:
            sources.append(PACKAGE / "kernels" / "vector_math.py")  # both kinds use it
            sources += [PACKAGE / "gpu" / name for name in ("compile.py", "entries.py")]
        else:
            sources.append(PACKAGE / "compile.py")
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).digest()


# A file in the cache ends with the SHA-256 of all before it, which the dynamic linker ignores: a
# cut library would kill the process that maps it.


def sealed(content: bytes) -> bytes:
    """`content` as it is kept in the cache."""
    return content + hashlib.sha256(content).digest()


def unsealed(path: Path) -> bytes:
    """What was sealed into an intact file."""
    return path.read_bytes()[:-_DIGEST_BYTES]


def is_intact(path: Path) -> bool:
    """Whether the cache holds the artefact, complete and unchanged."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return bool(body) and hashlib.sha256(body).digest() == digest
