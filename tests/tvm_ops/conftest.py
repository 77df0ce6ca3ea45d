"""Kernel tests compile all they need in one child process, up front."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tvm_ops.load import attention_spec, compact_spec, ensure_compiled

# (layout, dtype, head_dim) of every attention kernel the tests run: compiling is what they cost.
ATTENTION_VARIANTS = [
    ("vec", torch.float32, 16),
    ("vec", torch.float32, 64),
    ("vec", torch.bfloat16, 32),
    ("vec", torch.bfloat16, 64),
    ("vec", torch.bfloat16, 96),
    ("vec", torch.bfloat16, 256),
    ("vec", torch.float16, 128),
    ("vec16", torch.float32, 80),
    ("amx", torch.bfloat16, 64),
    ("amx", torch.bfloat16, 128),
]
CACHE_KINDS = [
    ("vec", torch.float32),
    ("vec", torch.bfloat16),
    ("vec", torch.float16),
    ("vec16", torch.float32),
    ("amx", torch.bfloat16),
]


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """All kernels of the suite, compiled together where the cache lacks them."""
    specs = {attention_spec(*variant) for variant in ATTENTION_VARIANTS}
    specs |= {compact_spec(*kind) for kind in CACHE_KINDS}
    ensure_compiled(sorted(specs, key=str))


@pytest.fixture(params=ATTENTION_VARIANTS, ids=lambda v: f"{v[0]}-{v[1]}-{v[2]}")
def variant(request: pytest.FixtureRequest) -> tuple[str, torch.dtype, int]:
    """(layout, dtype, head_dim) of each attention kernel."""
    return request.param


@pytest.fixture(params=CACHE_KINDS, ids=lambda v: f"{v[0]}-{v[1]}")
def cache_kind(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """(layout, dtype) of each kind of cache."""
    return request.param


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with one thread (keys are never split) and with two (they may be)."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
