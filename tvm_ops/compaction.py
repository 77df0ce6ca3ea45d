"""Moves of accepted tokens inside the key-value caches of all layers. Reference: reference.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tvm_ops.layouts import check_cache, find_layout
from tvm_ops.load import compact_spec, kernel, reference_requested
from tvm_ops.reference import compact_kv_reference


class KVCacheGroup:
    """The caches of all layers that share one block table; built once, after allocation.

    Layers that share one tensor count once. Keeps the tensors alive.
    """

    def __init__(self, caches: Sequence[Tensor], layout: str) -> None:
        """Check `caches`: [num_blocks, kv_heads, block_size, 2 * head_dim] each, in `layout`.

        Raises ValueError for an empty list or unequal or wrong shapes, TypeError for dtypes.
        """
        if not caches:
            raise ValueError("expected the caches of at least one layer, got none")
        kind = find_layout(layout)
        first = caches[0]
        for index, cache in enumerate(caches):
            check_cache(cache, kind)
            if cache.dtype != first.dtype:
                raise TypeError(f"layer {index} is {cache.dtype} but layer 0 is {first.dtype}")
            if cache.shape != first.shape:
                raise ValueError(
                    f"layer {index} has shape {list(cache.shape)} but layer 0 has "
                    f"{list(first.shape)}; make one group per shape"
                )
        self.caches = tuple({cache.data_ptr(): cache for cache in caches}.values())
        self.layout = layout
        self.addresses = torch.tensor([c.data_ptr() for c in self.caches], dtype=torch.int64)
        self.spec = compact_spec(layout, first.dtype)
        self.num_blocks, self.kv_heads, self.block_size, width = first.shape
        self.head_dim = width // 2

    @property
    def num_slots(self) -> int:
        """Slots of each cache: num_blocks * block_size."""
        return self.num_blocks * self.block_size


def compact_kv(caches: KVCacheGroup, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy the key and value of src_slots[i] to dst_slots[i], for i in order, in place.

    Every layer and KV head of `caches` is changed. Moves are sequential: move i is complete before
    move i + 1 reads, so a slot may be read after it was overwritten. A slot is
    block * block_size + offset.

    src_slots, dst_slots: int64 [M], contiguous, on the CPU, each in [0, num_slots).

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or range, and
    RuntimeError when the kernel has to be compiled and can't be.
    """
    for name, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        if slots.dtype != torch.int64:
            raise TypeError(f"{name} must be torch.int64, got {slots.dtype}")
        if slots.device.type != "cpu":
            raise ValueError(f"{name} must be on the CPU, got {slots.device}")
        if slots.dim() != 1 or not slots.is_contiguous():
            raise ValueError(f"{name} must be a contiguous vector, got shape {list(slots.shape)}")
    if len(src_slots) != len(dst_slots):
        raise ValueError(f"{len(src_slots)} source slots but {len(dst_slots)} destinations")
    if not len(src_slots):
        return
    for name, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        low, high = (int(x) for x in slots.aminmax())
        if low < 0 or high >= caches.num_slots:
            raise ValueError(f"{name} spans {low} to {high}, the caches have {caches.num_slots}")
    if reference_requested():
        compact_kv_reference(caches.caches, caches.layout, src_slots, dst_slots)
        return
    kernel(caches.spec)(
        caches.addresses,
        src_slots,
        dst_slots,
        caches.kv_heads,
        caches.block_size,
        caches.head_dim,
    )
