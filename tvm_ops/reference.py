"""One plain torch function per op: the meaning of tree_attention and compact_kv, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tvm_ops.layouts import read_rows, write_rows
from tvm_ops.tree_batch import WORD_BITS, TreeBatch


def tree_attention_reference(
    query: Tensor,
    kv_cache: Tensor,
    out: Tensor,
    batch: TreeBatch,
    *,
    scale: float,
    layout: str,
    softcap: float | None = None,
    sliding_window: int | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Twin of tree_attention: same arguments and result, `compute_dtype` throughout.

    Unlike its twin it needs finite values in the tree rows that a row does not see.
    """
    block_size, kv_heads = kv_cache.shape[2], kv_cache.shape[1]
    group = query.shape[1] // kv_heads
    for t in range(len(batch)):
        start, rows = int(batch.query_start[t]), int(batch.query_len[t])
        context = int(batch.context_len[t])
        position = torch.arange(context + rows)
        block = batch.block_table[t, position // block_size].long()
        keys, values = read_rows(kv_cache, layout, block * block_size + position % block_size)
        keys, values = keys.to(compute_dtype), values.to(compute_dtype)
        seen = torch.ones(rows, context + rows, dtype=torch.bool)
        for row in range(rows):
            words = batch.ancestor_masks[t, row].tolist()
            tree = [words[j // WORD_BITS] >> j % WORD_BITS & 1 == 1 for j in range(rows)]
            seen[row, context:] = torch.tensor(tree)
        if sliding_window is not None:
            depth = seen[:, context:].sum(-1) - 1
            place = torch.cat([position[:context], context + depth])
            seen &= place > (context + depth)[:, None] - sliding_window
        q = query[start : start + rows].to(compute_dtype).view(rows, kv_heads, group, -1)
        logits = torch.einsum("rhgd,phd->hgrp", q, keys) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        hidden = ~seen.to(logits.device)
        weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=-1)
        result = torch.einsum("hgrp,phd->rhgd", weights, values)
        out[start : start + rows] = result.flatten(1, 2).to(out.dtype)


def compact_kv_reference(
    caches: Sequence[Tensor], layout: str, src_slots: Tensor, dst_slots: Tensor
) -> None:
    """Twin of compact_kv on distinct `caches`: one move after the other, in place."""
    for cache in caches:
        for i in range(len(src_slots)):
            moved = read_rows(cache, layout, src_slots[i : i + 1])
            write_rows(cache, layout, dst_slots[i : i + 1], *moved)
