"""nvcc accepts every CUDA kernel, and what it makes of them fits a multiprocessor."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.tvm_ops.emulated_cuda import cuda_source
from tvm_ops.artifact import KernelSpec
from tvm_ops.gpu.compile import nvcc_architectures, run_nvcc

NVCC = shutil.which("nvcc")
ARCHITECTURES = sorted({80, 90, 100} & nvcc_architectures(NVCC)) if NVCC else []
SPECS = [
    *(
        KernelSpec("tree_attention", "strided", dtype, head_dim)
        for dtype, head_dim in [
            ("bfloat16", 64),
            ("float16", 64),
            ("bfloat16", 80),
            ("bfloat16", 96),
            ("bfloat16", 128),
            ("float16", 128),
            ("bfloat16", 256),
            ("float32", 128),
        ]
    ),
    KernelSpec("compact_kv", "strided", "uint32"),
]
SHARED_LIMIT = 48 * 1024  # bytes of static shared memory
# A multiprocessor has 64k registers: at 255 a thread, two blocks of 128 threads still fit.
REGISTER_LIMIT = 255
SPILL_LIMIT = 128  # bytes a thread; they stay in the first-level cache

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc on PATH: install the CUDA toolkit")
_USE = re.compile(r"Used (\d+) registers.*?(?:(\d+) bytes smem|$)", re.M)


@needs_nvcc
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.stem)
def test_nvcc_compiles_it_within_the_limits(spec):
    source = cuda_source(spec).code.decode()
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    code, messages = run_nvcc(str(NVCC), source, ["-fatbin", "-Xptxas", "-v", *flags])
    assert code
    used = [(int(registers), int(shared or 0)) for registers, shared in _USE.findall(messages)]
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill stores", messages)]
    assert len(used) == len(spills) == len(cuda_source(spec).kernels) * len(ARCHITECTURES)
    for (registers, shared), spilled in zip(used, spills, strict=True):
        assert registers <= REGISTER_LIMIT
        assert shared <= SHARED_LIMIT
        assert spilled <= SPILL_LIMIT


@needs_nvcc
def test_this_nvcc_knows_the_architectures_we_ship():
    assert {80, 90} <= set(ARCHITECTURES)
