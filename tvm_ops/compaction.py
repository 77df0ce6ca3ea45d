"""Moves of accepted tokens inside the key-value caches of all layers. Reference: reference.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tvm_ops.gpu.compaction import gpu_compact_kv, slots_on_device
from tvm_ops.layouts import check_cache, find_layout
from tvm_ops.load import compact_spec, kernel, reference_requested
from tvm_ops.reference import compact_kv_reference


class KVCacheGroup:
    """The caches of all layers that share one block table; built once, after allocation.

    Layers that share one tensor count once. Keeps the tensors alive.
    """

    def __init__(self, caches: Sequence[Tensor], layout: str) -> None:
        """Check `caches`: [num_blocks, kv_heads, block_size, 2 * head_dim] each, in `layout`.

        Raises ValueError for an empty list or unequal or wrong shapes, strides or devices,
        TypeError for dtypes.
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
            if cache.stride() != first.stride() or cache.device != first.device:
                raise ValueError(
                    f"layer {index} is on {cache.device} with strides {cache.stride()}, layer 0 on "
                    f"{first.device} with {first.stride()}; make one group for each"
                )
        if any(stride * first.element_size() % 4 for stride in first.stride()[:3]):
            raise ValueError(f"expected strides of multiples of 4 bytes, got {first.stride()}")
        self.caches = tuple({cache.data_ptr(): cache for cache in caches}.values())
        self.layout = layout
        addresses = torch.tensor([c.data_ptr() for c in self.caches], dtype=torch.int64)
        self.addresses = addresses.to(first.device)
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

    src_slots, dst_slots: int64 [M], contiguous, on the CPU, each in [0, num_slots). In layout
        "strided" both may be on the caches' device instead, for use in CUDA graphs; their values
        are not checked there, and a move whose source is negative is skipped.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or range, and
    RuntimeError when the kernel has to be compiled and can't be.
    """
    strided = caches.spec.on_gpu
    unchecked = strided and src_slots.device.type != "cpu" and not reference_requested()
    for name, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        if slots.dtype != torch.int64:
            raise TypeError(f"{name} must be torch.int64, got {slots.dtype}")
        wanted = caches.addresses.device if unchecked else torch.device("cpu")
        if slots.device != wanted:
            where = "the CPU" if wanted.type == "cpu" else str(wanted)
            raise ValueError(f"{name} must be on {where}, got {slots.device}")
        if slots.dim() != 1 or not slots.is_contiguous():
            raise ValueError(f"{name} must be a contiguous vector, got shape {list(slots.shape)}")
    if len(src_slots) != len(dst_slots):
        raise ValueError(f"{len(src_slots)} source slots but {len(dst_slots)} destinations")
    if not len(src_slots):
        return
    for name, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)) * (not unchecked):
        low, high = (int(x) for x in slots.aminmax())
        if low < 0 or high >= caches.num_slots:
            raise ValueError(f"{name} spans {low} to {high}, the caches have {caches.num_slots}")
    if reference_requested():
        compact_kv_reference(caches.caches, caches.layout, src_slots, dst_slots)
        return
    if strided:
        device = caches.addresses.device
        source, target = (slots_on_device(slots, device) for slots in (src_slots, dst_slots))
        gpu_compact_kv(caches.spec, caches.caches[0], caches.addresses, source, target)
        return
    kernel(caches.spec)(
        caches.addresses,
        src_slots,
        dst_slots,
        caches.kv_heads,
        caches.block_size,
        caches.head_dim,
    )
