"""compact_kv on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tvm_ops.artifact import KernelSpec
from tvm_ops.gpu.launch import stride_in_words
from tvm_ops.gpu.load import cuda_program


def gpu_compact_kv(
    spec: KernelSpec, cache: Tensor, addresses: Tensor, src_slots: Tensor, dst_slots: Tensor
) -> None:
    """Launch the kernel of `spec`; arguments as in tvm_ops.compact_kv, checked by it.

    cache: one of the caches, which all have its shape and strides. addresses: int64 [layers], on
    its device, where each begins. src_slots, dst_slots: int64 [M] on its device; a move with a
    negative source is skipped.
    """
    _, kv_heads, block_size, width = cache.shape
    values = {
        "caches": addresses.data_ptr(),
        "source": src_slots.data_ptr(),
        "target": dst_slots.data_ptr(),
        "block_stride": stride_in_words(cache, 0, "cache"),
        "head_stride": stride_in_words(cache, 1, "cache"),
        "token_stride": stride_in_words(cache, 2, "cache"),
        "num_layers": len(addresses),
        "kv_heads": kv_heads,
        "block_size": block_size,
        "token_words": width * cache.element_size() // 4,
        "num_moves": len(src_slots),
    }
    loaded = cuda_program(spec, cache.device)
    loaded.kernels["compact_kv"]((kv_heads, len(addresses)), values)


def slots_on_device(slots: Tensor, device: torch.device) -> Tensor:
    """`slots` on `device`, copied without waiting for it."""
    if device.type == "cuda" and slots.device.type == "cpu":
        slots = slots.pin_memory()
    return slots.to(device, non_blocking=True)
