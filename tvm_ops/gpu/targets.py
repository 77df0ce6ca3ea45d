"""The graphics processors that kernels are compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class GpuTarget:
    """A kind of graphics processor.

    kind: as TVM calls it. suffix: of files. index: type of offsets in a cache. tensor_cores: 16-bit
    elements are multiplied by mma instructions of NVIDIA's sm_80 and later. architectures: what the
    fat binary of CUDA holds, e.g. 90 for sm_90, as far as nvcc knows them.
    """

    name: str
    kind: str
    suffix: str
    index: str = "int32"
    tensor_cores: bool = False
    architectures: tuple[int, ...] = ()

    @property
    def identity(self) -> dict[str, object]:
        """What tells its artefacts from those of other targets."""
        return asdict(self)


GPU_TARGETS: Mapping[str, GpuTarget] = MappingProxyType(
    {
        target.name: target
        for target in (
            GpuTarget("cuda", "cuda", ".fatbin", "int64", True, (80, 90, 100)),
            GpuTarget("opencl", "opencl", ".cl", "int64"),
            GpuTarget("metal", "metal", ".metal", "int64"),
            GpuTarget("webgpu", "webgpu", ".wgsl"),
        )
    }
)
