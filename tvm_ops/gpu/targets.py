"""The graphics processors that kernels are compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class GpuTarget:
    """A kind of graphics processor.

    kind: as TVM calls it. index: type of offsets in a cache. tensor_cores: 16-bit elements are
    multiplied by mma instructions of NVIDIA's sm_80 and later. architectures: what the fat binary
    of CUDA holds, e.g. 90 for sm_90; of those that nvcc does not know, code for the nearest older
    one is used.
    """

    name: str
    kind: str
    suffix: str
    index: str = "int32"
    tensor_cores: bool = False
    architectures: tuple[int, ...] = ()


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
