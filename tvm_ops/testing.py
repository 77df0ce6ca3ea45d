"""Inputs and error bounds shared by the tests and the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tvm_ops.layouts import cache_shape, write_rows
from tvm_ops.reference import tree_attention_reference
from tvm_ops.tree_batch import WORD_BITS, TreeBatch


@dataclass(frozen=True, eq=False)
class AttentionCase:
    """Arguments of tree_attention; `out` and all unwritten cache slots hold NaN."""

    query: Tensor
    kv_cache: Tensor
    out: Tensor
    batch: TreeBatch
    scale: float
    layout: str
    softcap: float | None = None
    sliding_window: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of tree_attention."""
        names = ("scale", "layout", "softcap", "sliding_window")
        return {name: getattr(self, name) for name in names}

    def run(self, op: Callable[..., None]) -> Tensor:
        """Call `op` on a copy of out; return that copy."""
        out = self.out.clone()
        op(self.query, self.kv_cache, out, self.batch, **self.options)
        return out


def random_masks(lens: Sequence[int], generator: torch.Generator) -> Tensor:
    """Ancestor masks int64 [T, R, W] of random trees with these row counts, parents first."""
    trees = []
    for length in lens:
        seen: list[int] = []
        for row in range(length):
            parent = int(torch.randint(row, (1,), generator=generator)) if row else -1
            seen.append((seen[parent] if row else 0) | 1 << row)
        trees.append(seen)
    return pack_masks(trees)


def chain_masks(lens: Sequence[int]) -> Tensor:
    """Masks int64 [T, R, W] of chains: each row sees all before it, as causal attention does."""
    return pack_masks([[(1 << row + 1) - 1 for row in range(length)] for length in lens])


def pack_masks(trees: Sequence[Sequence[int]]) -> Tensor:
    """int64 [T, R, W] of each row's mask as a Python int, R the longest tree's rows."""
    rows = max(map(len, trees), default=1)
    words = -(-rows // WORD_BITS)
    masks = torch.zeros(len(trees), rows, words, dtype=torch.int64)
    for t, tree in enumerate(trees):
        for r, mask in enumerate(tree):
            for w in range(words):
                word = mask >> WORD_BITS * w & (1 << WORD_BITS) - 1
                masks[t, r, w] = word - (1 << WORD_BITS) if word >> WORD_BITS - 1 else word
    return masks


def make_case(
    *,
    layout: str,
    dtype: torch.dtype,
    head_dim: int,
    lens: Sequence[int],
    contexts: Sequence[int],
    kv_heads: int = 2,
    group: int = 3,
    block_size: int = 32,
    masks: Tensor | None = None,
    seed: int = 0,
) -> AttentionCase:
    """Random trees with scattered blocks, between rows that belong to no tree.

    query is a slice of a fused projection, block_table a slice of a wider table.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(c + n) // block_size) for c, n in zip(contexts, lens, strict=True)]
    num_blocks, width = sum(needed) + 2, max(needed, default=0) + 1
    blocks = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    table = torch.full((len(lens), width + 3), -7, dtype=torch.int32)
    cache = torch.full(
        cache_shape(num_blocks, kv_heads, block_size, head_dim), torch.nan, dtype=dtype
    )
    taken = 0
    for t, count in enumerate(needed):
        table[t, :count] = blocks[taken : taken + count]
        taken += count
        position = torch.arange(contexts[t] + lens[t])
        slots = table[t, position // block_size].long() * block_size + position % block_size
        shape = (len(slots), kv_heads, head_dim)
        keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        write_rows(cache, layout, slots, keys, values)
    starts = [1 + t + sum(lens[:t]) for t in range(len(lens))]
    num_tokens = sum(lens) + len(lens) + 1
    heads = kv_heads * group
    fused = torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim, generator=generator)
    query = fused.to(dtype)[:, : heads * head_dim].view(num_tokens, heads, head_dim)
    batch = TreeBatch(
        query_start=torch.tensor(starts, dtype=torch.int32),
        query_len=torch.tensor(list(lens), dtype=torch.int32),
        context_len=torch.tensor(list(contexts), dtype=torch.int32),
        ancestor_masks=random_masks(lens, generator) if masks is None else masks,
        block_table=table[:, :width],
    )
    out = torch.full((num_tokens, heads, head_dim), torch.nan, dtype=dtype)
    return AttentionCase(query, cache, out, batch, head_dim**-0.5, layout)


def tree_rows(batch: TreeBatch, num_tokens: int) -> Tensor:
    """bool [num_tokens]: which query rows belong to a tree."""
    mine = torch.zeros(num_tokens, dtype=torch.bool)
    for start, length in zip(batch.query_start.tolist(), batch.query_len.tolist(), strict=True):
        mine[start : start + length] = True
    return mine


def error_and_bound(case: AttentionCase, out: Tensor) -> tuple[float, float]:
    """Largest error of `out` on tree rows, and the largest allowed.

    The truth is the reference in float64. Allowed is twice the error of the reference computed in
    the case's own dtype, which a correct kernel undercuts because it sums in float32; plus, since
    that error may happen to be 0 on tiny inputs, one rounding step of the largest output.
    """
    mine = tree_rows(case.batch, len(out))
    exact, plain = torch.empty(out.shape, dtype=torch.float64), torch.empty_like(out)
    for result, dtype in ((exact, torch.float64), (plain, out.dtype)):
        tree_attention_reference(
            case.query,
            case.kv_cache,
            result,
            case.batch,
            **case.options,
            compute_dtype=dtype,
        )
    exact, plain, out = exact[mine], plain[mine].double(), out[mine].double()
    step = torch.finfo(case.out.dtype).eps * float(exact.abs().max())
    return float((out - exact).abs().max()), 2 * float((plain - exact).abs().max()) + step
