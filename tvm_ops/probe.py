"""Start-up check that the host writes its cache in the layout we read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tvm_ops.layouts import cache_shape, find_layout, read_rows


def check_layout(
    write: Callable[[Tensor, Tensor, Tensor, Tensor], None],
    layout: str,
    dtype: torch.dtype,
    *,
    head_dim: int,
    block_size: int,
    kv_heads: int = 2,
    device: torch.device | str = "cpu",
) -> None:
    """Raise RuntimeError unless `write`, the host's own op, writes what read_rows reads.

    write(keys, values, cache, slots) puts keys and values [N, kv_heads, head_dim] into cache
    [num_blocks, kv_heads, block_size, 2 * head_dim] at slots (int64 [N]), all on `device`.
    """
    kind = find_layout(layout)
    num_blocks = 3
    cache = torch.zeros(
        cache_shape(num_blocks, kv_heads, block_size, head_dim), dtype=dtype, device=device
    )
    generator = torch.Generator().manual_seed(0)
    shape = (num_blocks * block_size, kv_heads, head_dim)
    # Random bits of distinct rows: any swapped token, head or dimension shows.
    keys, values = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    slots = torch.randperm(num_blocks * block_size, generator=generator).to(device)
    write(keys, values, cache, slots)
    found_keys, found_values = read_rows(cache, layout, slots)
    wrong = [
        name
        for name, found, written in (("keys", found_keys, keys), ("values", found_values, values))
        if not torch.equal(found, written)
    ]
    if wrong:
        raise RuntimeError(
            f"the host does not write {' and '.join(wrong)} in layout {layout!r} (memory "
            f"{kind.memory!r}, {dtype}, head_dim {head_dim}, block size {block_size}): its "
            "version is not supported"
        )
