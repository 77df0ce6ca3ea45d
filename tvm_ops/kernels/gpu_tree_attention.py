"""Tree attention for any GPU: plain threads, float32 arithmetic, no vendor's intrinsics.

One block is one tree, one KV head, one run of SIMT_ROWS rows (tree row x head of the group, so
that a key is read once for the whole group) and one part of the keys; an online softmax (Milakov &
Gimelshein, arXiv:1805.02867) visits them tile by tile. With several parts, each leaves a partial
result and `combine` merges them. gpu_mma_attention.py is the variant for tensor cores.

Before: everything was checked by the caller; nothing is checked here. Strides count words of
gpu_words.py. blockIdx.x is row tile x splits + split, blockIdx.y tree x KV heads + KV head.
After: out holds all rows of all trees, or `partial` the parts: for block b and row r, head_dim
unnormalised sums, the maximum (base-2 logits) and the weight, at (b * rows + r) * (head_dim + 2).
"""

from tvm.script import tirx as T

from tvm_ops.kernels.gpu_words import (
    HIDDEN,
    LOWEST,
    TREE_CONTEXT,
    TREE_FIELDS,
    TREE_ROWS,
    TREE_START,
    cap_logit,
    elements_per_word,
    sees,
    split_tiles,
    word_of,
    word_to_float32,
)

SIMT_THREADS = 128
SIMT_ROWS = 16
SIMT_KEYS = 32
COMBINE_THREADS = 128
COMBINE_ROWS = 4  # of a block of the combine kernel, 32 threads each
_GROUPS = SIMT_THREADS // SIMT_KEYS  # threads that share a key
_OWN_ROWS = SIMT_ROWS // _GROUPS  # rows whose logits one thread computes, for one key


def row_offset(trees, tree, head, row, group, row_stride, head_stride, index):
    """Offset in query or out of a row that counts tree row x head of the group."""
    token = T.cast(trees[tree * TREE_FIELDS + TREE_START] + T.truncdiv(row, group), index)
    return token * row_stride + T.cast(head * group + T.truncmod(row, group), index) * head_stride


def key_offset(
    table, tree, table_stride, position, block_size, head, block_stride, head_stride, stride, index
):
    """Offset in the cache of the key at `position` of a tree's sequence."""
    block = table[
        T.cast(tree, index) * table_stride + T.cast(T.truncdiv(position, block_size), index)
    ]
    return (
        T.cast(block, index) * block_stride
        + T.cast(head, index) * head_stride
        + T.cast(T.truncmod(position, block_size), index) * stride
    )


def tree_attention_simt_kernel(dtype: str, head_dim: int, index: str = "int64"):
    """TVM function for an element type, head_dim and type of offsets ("int32" for WebGPU)."""
    per, d = elements_per_word(dtype), head_dim
    w = d // per
    cells = SIMT_ROWS * w // SIMT_THREADS  # words of the sums that one thread keeps
    if cells * SIMT_THREADS != SIMT_ROWS * w:
        raise ValueError(f"head_dim must be divisible by 16, got {head_dim}")
    offset_type = getattr(T, index)

    @T.prim_func
    def tree_attention_simt(
        query_h: T.handle,
        cache_h: T.handle,
        out_h: T.handle,
        trees_h: T.handle,
        masks_h: T.handle,
        first_visible_h: T.handle,
        table_h: T.handle,
        partial_h: T.handle,
        query_row_stride: offset_type,
        query_head_stride: offset_type,
        out_row_stride: offset_type,
        out_head_stride: offset_type,
        block_stride: offset_type,
        head_stride: offset_type,
        token_stride: offset_type,
        table_stride: offset_type,
        num_trees: T.int32,
        kv_heads: T.int32,
        group: T.int32,
        block_size: T.int32,
        mask_rows: T.int32,
        mask_words: T.int32,
        row_tiles: T.int32,
        splits: T.int32,
        scale: T.float32,
        softcap: T.float32,
    ):
        T.func_attr({"tirx.noalias": True, "global_symbol": "tree_attention"})
        query_size = offset_type()
        cache_size = offset_type()
        out_size = offset_type()
        trees_size = offset_type()
        masks_size = offset_type()
        starts_size = offset_type()
        table_size = offset_type()
        partial_size = offset_type()
        query = T.match_buffer(query_h, (query_size,), "uint32", align=4)
        cache = T.match_buffer(cache_h, (cache_size,), "uint32", align=4)
        out = T.match_buffer(out_h, (out_size,), "uint32", align=4)
        trees = T.match_buffer(trees_h, (trees_size,), "int32", align=4)
        masks = T.match_buffer(masks_h, (masks_size,), "int32", align=4)
        first_visible = T.match_buffer(first_visible_h, (starts_size,), "int32", align=4)
        table = T.match_buffer(table_h, (table_size,), "int32", align=4)
        partial = T.match_buffer(partial_h, (partial_size,), "float32", align=4)

        for by in T.thread_binding(num_trees * kv_heads, "blockIdx.y"):
            for bx in T.thread_binding(row_tiles * splits, "blockIdx.x"):
                for tx in T.thread_binding(SIMT_THREADS, "threadIdx.x"):
                    scores = T.alloc_buffer((SIMT_ROWS * SIMT_KEYS,), "float32", scope="shared")
                    row_max = T.alloc_buffer((SIMT_ROWS,), "float32", scope="shared")
                    row_sum = T.alloc_buffer((SIMT_ROWS,), "float32", scope="shared")
                    decay = T.alloc_buffer((SIMT_ROWS,), "float32", scope="shared")
                    key_at = T.alloc_buffer((SIMT_KEYS,), index, scope="shared")
                    acc = T.alloc_buffer((cells * per,), "float32", scope="local")
                    dot = T.alloc_buffer((_OWN_ROWS,), "float32", scope="local")
                    query_at = T.alloc_buffer((_OWN_ROWS,), index, scope="local")
                    best = T.alloc_buffer((3,), "float32", scope="local")

                    tree: T.let[T.int32] = T.truncdiv(by, kv_heads)
                    head: T.let[T.int32] = T.truncmod(by, kv_heads)
                    first_row: T.let[T.int32] = T.truncdiv(bx, splits) * SIMT_ROWS
                    split: T.let[T.int32] = T.truncmod(bx, splits)
                    rows: T.let[T.int32] = trees[tree * TREE_FIELDS + TREE_ROWS] * group
                    context: T.let[T.int32] = trees[tree * TREE_FIELDS + TREE_CONTEXT]
                    last_key: T.let[T.int32] = context + trees[tree * TREE_FIELDS + TREE_ROWS] - 1
                    first_key, tiles, share = split_tiles(trees, tree, SIMT_KEYS, splits)
                    count: T.let[T.int32] = T.Select(
                        first_row < rows, T.max(T.min(tiles - split * share, share), 0), 0
                    )

                    for i in T.unroll(cells * per):
                        acc[i] = T.float32(0)
                    # Of row tx, for the first SIMT_ROWS threads: maximum and weight so far.
                    best[0] = T.float32(LOWEST)
                    best[1] = T.float32(0)
                    for i in T.unroll(_OWN_ROWS):
                        query_at[i] = row_offset(
                            trees,
                            tree,
                            head,
                            # Rows beyond the last compute what nobody reads.
                            T.max(T.min(first_row + tx // SIMT_KEYS + i * _GROUPS, rows - 1), 0),
                            group,
                            query_row_stride,
                            query_head_stride,
                            index,
                        )

                    for tile in range(count):
                        first: T.let[T.int32] = first_key + (split * share + tile) * SIMT_KEYS
                        if tx < SIMT_KEYS:
                            key_at[tx] = key_offset(
                                table,
                                tree,
                                table_stride,
                                T.min(first + tx, last_key),
                                block_size,
                                head,
                                block_stride,
                                head_stride,
                                token_stride,
                                index,
                            )
                        T.tvm_storage_sync("shared")

                        for i in T.unroll(_OWN_ROWS):
                            dot[i] = T.float32(0)
                        for k in range(w):
                            key_word: T.let[T.uint32] = cache[
                                key_at[tx % SIMT_KEYS] + T.cast(k, index)
                            ]
                            for i in T.unroll(_OWN_ROWS):
                                query_word: T.let[T.uint32] = query[query_at[i] + T.cast(k, index)]
                                for e in T.unroll(per):
                                    dot[i] = dot[i] + word_to_float32(
                                        query_word, e, dtype
                                    ) * word_to_float32(key_word, e, dtype)
                        for i in T.unroll(_OWN_ROWS):
                            row: T.let[T.int32] = first_row + tx // SIMT_KEYS + i * _GROUPS
                            position: T.let[T.int32] = first + tx % SIMT_KEYS
                            seen: T.let[T.bool] = sees(
                                masks,
                                first_visible,
                                tree,
                                T.truncdiv(T.max(T.min(row, rows - 1), 0), group),
                                position,
                                context,
                                mask_rows,
                                mask_words,
                            )
                            dot[i] = T.Select(
                                seen, cap_logit(dot[i] * scale, softcap), T.float32(HIDDEN)
                            )
                            scores[tx + i * SIMT_THREADS] = dot[i]
                        T.tvm_storage_sync("shared")

                        if tx < SIMT_ROWS:
                            best[2] = best[0]
                            for j in range(SIMT_KEYS):
                                best[0] = T.max(best[0], scores[tx * SIMT_KEYS + j])
                            decay[tx] = T.exp2(best[2] - best[0])
                            row_max[tx] = best[0]
                        T.tvm_storage_sync("shared")

                        for i in T.unroll(_OWN_ROWS):
                            scores[tx + i * SIMT_THREADS] = T.exp2(
                                dot[i] - row_max[tx // SIMT_KEYS + i * _GROUPS]
                            )
                        T.tvm_storage_sync("shared")

                        if tx < SIMT_ROWS:
                            best[1] = best[1] * decay[tx]
                            for j in range(SIMT_KEYS):
                                best[1] = best[1] + scores[tx * SIMT_KEYS + j]
                        for c in T.unroll(cells):
                            for e in T.unroll(per):
                                acc[c * per + e] = (
                                    acc[c * per + e] * decay[(tx + c * SIMT_THREADS) // w]
                                )
                        for j in range(SIMT_KEYS):
                            for c in T.unroll(cells):
                                value_word: T.let[T.uint32] = cache[
                                    key_at[j] + T.cast(w + (tx + c * SIMT_THREADS) % w, index)
                                ]
                                weight: T.let[T.float32] = scores[
                                    (tx + c * SIMT_THREADS) // w * SIMT_KEYS + j
                                ]
                                # 0 * NaN would poison rows that do not see this key.
                                if weight != T.float32(0):
                                    for e in T.unroll(per):
                                        acc[c * per + e] = acc[
                                            c * per + e
                                        ] + weight * word_to_float32(value_word, e, dtype)
                        T.tvm_storage_sync("shared")

                    if tx < SIMT_ROWS:
                        row_sum[tx] = best[1]
                    T.tvm_storage_sync("shared")
                    if count > 0:
                        for c in T.unroll(cells):
                            place: T.let[T.int32] = (tx + c * SIMT_THREADS) // w
                            word: T.let[T.int32] = (tx + c * SIMT_THREADS) % w
                            if first_row + place < rows:
                                if splits == 1:
                                    for e in T.unroll(per):
                                        acc[c * per + e] = acc[c * per + e] / row_sum[place]
                                    out[
                                        row_offset(
                                            trees,
                                            tree,
                                            head,
                                            first_row + place,
                                            group,
                                            out_row_stride,
                                            out_head_stride,
                                            index,
                                        )
                                        + T.cast(word, index)
                                    ] = word_of(acc, c, dtype)
                                else:
                                    at: T.let[offset_type] = (
                                        T.cast(by * (row_tiles * splits) + bx, index) * SIMT_ROWS
                                        + T.cast(place, index)
                                    ) * (d + 2)
                                    for e in T.unroll(per):
                                        partial[at + T.cast(word * per + e, index)] = acc[
                                            c * per + e
                                        ]
                                    if word == 0:
                                        partial[at + d] = row_max[place]
                                        partial[at + (d + 1)] = row_sum[place]

    return tree_attention_simt


def combine_kernel(dtype: str, head_dim: int, block_rows: int, key_tile: int, index: str = "int64"):
    """TVM function that merges the parts which an attention kernel with these tiles left.

    One block is COMBINE_ROWS rows of one row tile; the log-sum-exp combination is exact.
    """
    per, d = elements_per_word(dtype), head_dim
    w = d // per
    lanes = COMBINE_THREADS // COMBINE_ROWS
    blocks = block_rows // COMBINE_ROWS
    offset_type = getattr(T, index)

    @T.prim_func
    def combine(
        out_h: T.handle,
        trees_h: T.handle,
        partial_h: T.handle,
        out_row_stride: offset_type,
        out_head_stride: offset_type,
        num_trees: T.int32,
        kv_heads: T.int32,
        group: T.int32,
        row_tiles: T.int32,
        splits: T.int32,
    ):
        T.func_attr({"tirx.noalias": True, "global_symbol": "combine"})
        out_size = offset_type()
        trees_size = offset_type()
        partial_size = offset_type()
        out = T.match_buffer(out_h, (out_size,), "uint32", align=4)
        trees = T.match_buffer(trees_h, (trees_size,), "int32", align=4)
        partial = T.match_buffer(partial_h, (partial_size,), "float32", align=4)

        for by in T.thread_binding(num_trees * kv_heads, "blockIdx.y"):
            for bx in T.thread_binding(row_tiles * blocks, "blockIdx.x"):
                for tx in T.thread_binding(COMBINE_THREADS, "threadIdx.x"):
                    stat = T.alloc_buffer((2,), "float32", scope="local")
                    acc = T.alloc_buffer((per,), "float32", scope="local")
                    tree: T.let[T.int32] = T.truncdiv(by, kv_heads)
                    head: T.let[T.int32] = T.truncmod(by, kv_heads)
                    row: T.let[T.int32] = bx * COMBINE_ROWS + tx // lanes
                    # Not `_`: TVM would make it `__1`, which WGSL forbids.
                    first_key, tiles, share = split_tiles(trees, tree, key_tile, splits)  # noqa: RUF059
                    if row < trees[tree * TREE_FIELDS + TREE_ROWS] * group:
                        # Splits without a tile wrote nothing.
                        used: T.let[T.int32] = T.truncdiv(tiles + share - 1, T.max(share, 1))
                        base: T.let[offset_type] = (
                            T.cast((by * row_tiles + bx // blocks) * splits, index) * block_rows
                            + T.cast(row % block_rows, index)
                        ) * (d + 2)
                        step: T.let[offset_type] = T.cast(block_rows * (d + 2), index)
                        stat[0] = T.float32(LOWEST)
                        for s in range(used):
                            stat[0] = T.max(stat[0], partial[base + T.cast(s, index) * step + d])
                        stat[1] = T.float32(0)
                        for s in range(used):
                            at: T.let[offset_type] = base + T.cast(s, index) * step
                            stat[1] = stat[1] + partial[at + (d + 1)] * T.exp2(
                                partial[at + d] - stat[0]
                            )
                        for c in range((w + lanes - 1) // lanes):
                            word: T.let[T.int32] = tx % lanes + c * lanes
                            if word < w:
                                for e in T.unroll(per):
                                    acc[e] = T.float32(0)
                                for s in range(used):
                                    at: T.let[offset_type] = base + T.cast(s, index) * step
                                    weight: T.let[T.float32] = T.exp2(partial[at + d] - stat[0])
                                    for e in T.unroll(per):
                                        acc[e] = (
                                            acc[e]
                                            + weight * (partial[at + T.cast(word * per + e, index)])
                                        )
                                for e in T.unroll(per):
                                    acc[e] = acc[e] / stat[1]
                                out[
                                    row_offset(
                                        trees,
                                        tree,
                                        head,
                                        row,
                                        group,
                                        out_row_stride,
                                        out_head_stride,
                                        index,
                                    )
                                    + T.cast(word, index)
                                ] = word_of(acc, 0, dtype)

    return combine
