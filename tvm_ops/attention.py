"""Attention of tree rows over the paged key-value cache. Reference: reference.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tvm_ops.gpu.attention import gpu_tree_attention
from tvm_ops.gpu.tree_tables import TreeTables
from tvm_ops.layouts import check_cache, find_layout
from tvm_ops.load import attention_spec, kernel, reference_requested
from tvm_ops.reference import tree_attention_reference
from tvm_ops.tree_batch import TreeBatch

_LOG2_E = math.log2(math.e)


def tree_attention(
    query: Tensor,
    kv_cache: Tensor,
    out: Tensor,
    batch: TreeBatch | TreeTables,
    *,
    scale: float,
    layout: str,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> None:
    """Write softmax(scale * q k^T) v of every tree row into `out`.

    Row r of tree t sees positions 0 to context_len[t] - 1, and the tree rows in its mask. What a
    row does not see has no influence on it, whatever its cache slot holds. In loop form, for each
    tree, row, and head h:

        logits = scale * [q . key(p, h // group) for p the row sees]
        weights = softmax(logits), or softmax(softcap * tanh(logits / softcap))
        out[query_start + row, h] = sum of weights * value(p, h // group)

    with group = num_heads / kv_heads, sums and softmax in float32.

    query: [num_tokens, num_heads, head_dim], the cache's dtype (float32, bfloat16, float16); last
        dimension contiguous, other strides free, so it may be a slice of a fused projection.
    kv_cache: [num_blocks, kv_heads, block_size, 2 * head_dim], contiguous, in `layout`. In layout
        "strided" only the last dimension is contiguous; the others begin at multiples of 16 bytes.
    out: like query, no overlap with the inputs. Rows of trees are written, others left alone.
    scale: factor of the logits, often head_dim ** -0.5.
    batch: the trees; for layout "strided" a TreeTables on the GPU that holds them.
    layout: name in LAYOUTS: on the CPU "vec", "vec16" or "amx", on a CUDA device "strided", where
        the work is launched on the current stream, without allocation or synchronisation once
        the batch's scratch is as large as needed.
    softcap: bound of the logits, as in Gemma 2; None: none.
    sliding_window: each row sees at most this many positions, its own the last; None: all. A row's
        position is context_len + its depth in the tree.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, stride, device or range, and
    RuntimeError when the kernel has to be compiled and can't be.
    """
    spec = attention_spec(layout, kv_cache.dtype, kv_cache.shape[-1] // 2)
    kind = find_layout(layout)
    check_cache(kv_cache, kind)
    num_blocks, kv_heads, block_size, width = kv_cache.shape
    head_dim = width // 2
    if isinstance(batch, TreeTables) != kind.strided:
        wanted = "TreeTables" if kind.strided else "TreeBatch"
        raise TypeError(
            f"layout {layout!r} needs its trees as {wanted}, got {type(batch).__name__}"
        )
    _check_rows("query", query, kv_cache, head_dim)
    _check_rows("out", out, kv_cache, head_dim)
    if query.shape != out.shape:
        raise ValueError(f"query is {list(query.shape)} but out is {list(out.shape)}")
    for name, tensor in (("query", query), ("the cache", kv_cache)):
        if _overlap(out, tensor):
            raise ValueError(f"out shares memory with {name}: give it memory of its own")
    num_tokens, num_heads, _ = query.shape
    if not kv_heads or not num_heads or num_heads % kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide among {kv_heads} KV heads")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, or None, got {softcap}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, or None, got {sliding_window}")
    trees = batch.batch if isinstance(batch, TreeTables) else batch
    if trees is not None and trees.query_end > num_tokens:
        raise ValueError(f"trees reach query row {trees.query_end - 1} of {num_tokens} rows")
    if isinstance(batch, TreeBatch):
        batch.check_blocks(num_blocks, block_size)
    if reference_requested():
        if trees is not None:
            tree_attention_reference(
                query,
                kv_cache,
                out,
                trees,
                scale=scale,
                layout=layout,
                softcap=softcap,
                sliding_window=sliding_window,
            )
        return
    group = num_heads // kv_heads
    # The kernels take base-2 logits.
    kernel_scale = scale / softcap if softcap else scale * _LOG2_E
    kernel_softcap = softcap * _LOG2_E if softcap else 0.0
    if isinstance(batch, TreeTables):
        gpu_tree_attention(
            spec,
            query,
            kv_cache,
            out,
            batch,
            scale=kernel_scale,
            softcap=kernel_softcap,
            sliding_window=sliding_window,
        )
        return
    if not len(batch):
        return
    plan = batch.plan(kv_heads, group, head_dim, torch.get_num_threads(), sliding_window)
    kernel(spec)(
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        kv_cache.data_ptr(),
        kv_heads,
        block_size,
        group,
        kernel_scale,
        kernel_softcap,
        *plan.arguments,
    )


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors lie in ranges of memory that overlap."""
    start, other = first.data_ptr(), second.data_ptr()
    # The lower one has to end before the other begins; most often that is plain at once.
    return _ends_after(first, other) if start <= other else _ends_after(second, start)


def _ends_after(tensor: Tensor, address: int) -> bool:
    distance = address - tensor.data_ptr()
    if distance >= tensor.untyped_storage().nbytes():
        return False
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and distance < tensor.element_size() * (last + 1)


def _check_rows(name: str, tensor: Tensor, cache: Tensor, head_dim: int) -> None:
    if tensor.dtype != cache.dtype:
        raise TypeError(f"{name} is {tensor.dtype} but the cache is {cache.dtype}")
    if tensor.device != cache.device:
        where = "the CPU" if cache.device.type == "cpu" else str(cache.device)
        raise ValueError(f"{name} is on {tensor.device}, the cache on {where}")
    if tensor.dim() != 3 or tensor.shape[2] != head_dim:
        raise ValueError(
            f"{name} must be [num_tokens, num_heads, {head_dim}] for this cache, got "
            f"{list(tensor.shape)}"
        )
    if tensor.stride(2) != 1:
        raise ValueError(f"{name}'s last dimension must be contiguous, strides {tensor.stride()}")
