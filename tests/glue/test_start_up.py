"""What happens before the weights load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_plugin.vllm_glue import kv_cache, worker


def config(dtype: torch.dtype, head_dim: int, cache_dtype: str = "auto") -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, get_head_size=lambda: head_dim),
        cache_config=SimpleNamespace(block_size=32, cache_dtype=cache_dtype),
    )


def test_kernels_begin_to_compile_before_the_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    monkeypatch.setattr(kv_cache, "start_warm_up", lambda *kernels: events.append(kernels))
    monkeypatch.setattr(worker.CPUModelRunner, "load_model", lambda self: events.append("load"))
    runner = object.__new__(worker.MedusaCPUModelRunner)
    runner.vllm_config = config(torch.float32, 80)
    runner.load_model()
    assert events == [("vec16", torch.float32, 80), "load"]


def test_a_cache_without_kernels_is_left_to_the_check_of_the_real_one() -> None:
    kv_cache.start_kernels(config(torch.float32, 72), "vec")
