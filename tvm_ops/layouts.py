"""The paged key-value cache layouts of vLLM's attention, and plain torch access to them.

A layer's cache is one tensor [num_blocks, kv_heads, block_size, 2 * head_dim]. On a GPU, layout
"strided", a token's key and value are its last dimension, contiguous; the others have any strides,
so a block may hold tokens before heads (NHD) or heads before tokens (HND).

On a CPU the tensor is contiguous and its last two dimensions only count elements: inside one
(block, head) the memory is, row-major,

    "vec"   keys [head_dim][block_size], then values [block_size][head_dim]
    "amx"   keys [block_size/16][head_dim/2][16 tokens][2 dims],
            then values [head_dim/16][block_size/2][16 dims][2 tokens]; bfloat16 only

"vec16" is vLLM's name for a vec kernel that accepts any block size or head_dim divisible by 16; its
memory is that of "vec".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
)


@dataclass(frozen=True)
class KVLayout:
    """One cache layout; `memory` names what is in memory, which two layouts may share.

    strided: the layout of GPUs; its tensor may be anywhere and have strides.
    """

    name: str
    memory: str
    dtypes: tuple[torch.dtype, ...]
    block_multiple: int
    head_dim_multiple: int
    key_tokens: int  # tokens packed together in keys
    value_tokens: int  # tokens packed together in values
    strided: bool = False


_VEC_DTYPES = tuple(DTYPE_NAMES)
LAYOUTS: Mapping[str, KVLayout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            KVLayout("vec", "vec", _VEC_DTYPES, 16, 16, 1, 1),
            KVLayout("vec16", "vec", _VEC_DTYPES, 16, 16, 1, 1),
            KVLayout("amx", "amx", (torch.bfloat16,), 32, 16, 16, 2),
            KVLayout("strided", "strided", tuple(DTYPE_NAMES), 1, 16, 1, 1, strided=True),
        )
    }
)


def find_layout(name: str) -> KVLayout:
    """The layout called `name`, which is also vLLM's name of the kernel that writes it.

    Raises ValueError for a name that is not in LAYOUTS.
    """
    layout = LAYOUTS.get(name)
    if layout is None:
        raise ValueError(f"unknown KV-cache layout {name!r}: expected one of {sorted(LAYOUTS)}")
    return layout


def cache_shape(
    num_blocks: int, kv_heads: int, block_size: int, head_dim: int
) -> tuple[int, int, int, int]:
    """Shape of one layer's cache."""
    return num_blocks, kv_heads, block_size, 2 * head_dim


def check_cache(cache: Tensor, layout: KVLayout) -> None:
    """Raise TypeError (dtype) or ValueError (shape, strides, device) unless `layout` fits."""
    if cache.dtype not in layout.dtypes:
        raise TypeError(
            f"layout {layout.name!r} holds {[str(d) for d in layout.dtypes]}, the cache is "
            f"{cache.dtype}"
        )
    if cache.device.type != "cpu" and not layout.strided:
        raise ValueError(f"the cache is on {cache.device}, layout {layout.name!r} lives on the CPU")
    placed = cache.stride()[-1:] == (1,) if layout.strided else cache.is_contiguous()
    if cache.dim() != 4 or not placed:
        raise ValueError(
            f"expected a {'' if layout.strided else 'contiguous '}cache [num_blocks, kv_heads, "
            f"block_size, 2 * head_dim]{' with a contiguous last dimension' * layout.strided}, got "
            f"shape {tuple(cache.shape)} with strides {cache.stride()}"
        )
    block_size, width = cache.shape[2:]
    if block_size == 0 or block_size % layout.block_multiple:
        raise ValueError(
            f"layout {layout.name!r} needs a block size divisible by {layout.block_multiple}, "
            f"got {block_size}"
        )
    if width == 0 or width % (2 * layout.head_dim_multiple):
        raise ValueError(
            f"layout {layout.name!r} needs a head_dim divisible by {layout.head_dim_multiple}, "
            f"got {width / 2:g} (half of the last cache dimension)"
        )


def _token_views(cache: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """Views [num_blocks, kv_heads, token group, token in group, ...] whose rest is head_dim."""
    num_blocks, heads, block_size, width = cache.shape
    head_dim = width // 2
    if layout.strided:
        keys, values = cache[..., :head_dim], cache[..., head_dim:]
        return keys.unsqueeze(3), values.unsqueeze(3)
    flat = cache.view(num_blocks, heads, 2, block_size * head_dim)
    keys, values = flat[:, :, 0], flat[:, :, 1]
    outer = (num_blocks, heads)
    if layout.memory == "vec":
        return (
            keys.view(*outer, head_dim, block_size).transpose(2, 3).unsqueeze(3),
            values.view(*outer, block_size, 1, head_dim),
        )
    return (
        keys.view(*outer, block_size // 16, head_dim // 2, 16, 2).permute(0, 1, 2, 4, 3, 5),
        values.view(*outer, head_dim // 16, block_size // 2, 16, 2).permute(0, 1, 3, 5, 2, 4),
    )


def read_rows(cache: Tensor, layout: str, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [len(slots), kv_heads, head_dim] of the tokens at `slots` (int64), as copies.

    A slot is block * block_size + offset. Raises as check_cache does.
    """
    kind = find_layout(layout)
    check_cache(cache, kind)
    block_size, head_dim = cache.shape[2], cache.shape[3] // 2
    keys, values = _token_views(cache, kind)
    block, offset = slots // block_size, slots % block_size
    shape = (len(slots), cache.shape[1], head_dim)
    k = keys[block, :, offset // kind.key_tokens, offset % kind.key_tokens]
    v = values[block, :, offset // kind.value_tokens, offset % kind.value_tokens]
    return k.reshape(shape), v.reshape(shape)


def write_rows(cache: Tensor, layout: str, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values [len(slots), kv_heads, head_dim] into `cache` at `slots` (int64).

    The slots must be distinct. Raises as check_cache does.
    """
    kind = find_layout(layout)
    check_cache(cache, kind)
    block_size = cache.shape[2]
    key_view, value_view = _token_views(cache, kind)
    block, offset = slots // block_size, slots % block_size
    shape = (*keys.shape[:2], *key_view.shape[4:])
    key_view[block, :, offset // kind.key_tokens, offset % kind.key_tokens] = keys.reshape(shape)
    shape = (*values.shape[:2], *value_view.shape[4:])
    value_view[block, :, offset // kind.value_tokens, offset % kind.value_tokens] = values.reshape(
        shape
    )
