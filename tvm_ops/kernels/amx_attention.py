"""Tree attention on Intel AMX, over the paged cache layout "amx", whose words are AMX tiles.

Twin of tree_attention.py: same name, arguments and work items. An item's rows are handled in tiles
of 16, two at a time where there are more, KEYS keys at a time with an online softmax. Scores and
sums are products of bfloat16 tiles added up in float32; weights are rounded to bfloat16, and
row sums add up the rounded weights, so that the rounding of a weight shifts a mean of values, not
their scale.

A tile of keys that all rows see whole ("full") is read where it is. Of any other the values are
copied first, zeros in place of unwritten slots: there is nothing that a weight of 0 times NaN could
be. Scores need no such care: what a key holds stays in its own column, which masking overwrites.
"""

from tvm.script import tirx as T

from tvm_ops.kernels import amx_tiles
from tvm_ops.kernels.amx_steps import (
    KEYS,
    STEP_UNITS,
    STEPS,
    UNITS,
    left_index,
    score_op,
    soften_op,
    stage_op,
    weigh_carefully_op,
    weigh_op,
)
from tvm_ops.kernels.amx_tiles import TILE_DEPTH, TILE_ROWS, TILE_WORDS, blocks_for
from tvm_ops.kernels.merge import ITEM_ROWS, finish_op, merge_all_op, row_start
from tvm_ops.kernels.tile_ops import mask_scores
from tvm_ops.kernels.vector_math import INFINITY_BITS, LANES, LOWEST, tanh

# ruff: noqa: B023 (the inlined functions are expanded inside the loop whose variables they use)
PAIR_ROWS = 2 * TILE_ROWS


def amx_attention_kernel(head_dim: int):
    """TVM function for layout "amx" and one head_dim, on processors with AMX."""
    d = head_dim
    flat = T.int64(1 << 46)
    chunks, query_steps = d // LANES, -(-d // TILE_DEPTH)
    blocks = blocks_for(d)
    score, soften, stage = score_op(d), soften_op(d), stage_op(d)
    weigh, weigh_carefully = weigh_op(d), weigh_carefully_op(d)
    finish, merge_all = finish_op("bfloat16", d), merge_all_op("bfloat16", d)

    @T.prim_func
    def tree_attention(
        query_address: T.int64,
        query_row_stride: T.int64,
        query_head_stride: T.int64,
        out_address: T.int64,
        out_row_stride: T.int64,
        out_head_stride: T.int64,
        cache_address: T.int64,
        num_kv_heads: T.int64,
        block_size: T.int32,
        group: T.int32,
        scale: T.float32,
        softcap: T.float32,
        items_h: T.handle,
        merges_h: T.handle,
        query_start_h: T.handle,
        query_len_h: T.handle,
        context_len_h: T.handle,
        masks_h: T.handle,
        row_starts_h: T.handle,
        block_table_h: T.handle,
        partial_sum_h: T.handle,
        partial_stat_h: T.handle,
        parallel_merge: T.int32,
    ):
        T.func_attr({"tirx.noalias": True})
        num_items = T.int64()
        num_merges = T.int64()
        num_trees = T.int64()
        mask_rows = T.int64()
        words = T.int64()
        table_width = T.int64()
        table_stride = T.int64()
        num_partials = T.int64()
        items = T.match_buffer(items_h, (num_items, T.int64(8)), "int32", align=4)
        merges = T.match_buffer(merges_h, (num_merges, T.int64(8)), "int32", align=4)
        query_start = T.match_buffer(query_start_h, (num_trees,), "int32", align=4)
        query_len = T.match_buffer(query_len_h, (num_trees,), "int32", align=4)
        context_len = T.match_buffer(context_len_h, (num_trees,), "int32", align=4)
        masks = T.match_buffer(masks_h, (num_trees, mask_rows, words), "int64", align=8)
        row_starts = T.match_buffer(row_starts_h, (num_trees, mask_rows), "int32", align=4)
        table = T.match_buffer(
            block_table_h,
            (num_trees, table_width),
            "int32",
            strides=(table_stride, T.int64(1)),
            align=4,
        )
        partial_sum = T.match_buffer(
            partial_sum_h, (num_partials, T.int64(ITEM_ROWS), T.int64(d)), "float32", align=4
        )
        partial_stat = T.match_buffer(
            partial_stat_h, (num_partials, T.int64(ITEM_ROWS), T.int64(2)), "float32", align=4
        )
        query_ptr: T.let[T.handle("uint16")] = T.reinterpret(T.handle("uint16").ty, query_address)
        out_ptr: T.let[T.handle("uint16")] = T.reinterpret(T.handle("uint16").ty, out_address)
        cache_ptr: T.let[T.handle("uint32")] = T.reinterpret(T.handle("uint32").ty, cache_address)
        query = T.decl_buffer((flat,), "uint16", data=query_ptr, align=2)
        out = T.decl_buffer((flat,), "uint16", data=out_ptr, align=2)
        cache = T.decl_buffer((flat,), "uint32", data=cache_ptr, align=4)

        for item in T.parallel(num_items):
            tree: T.let[T.int32] = items[item, 0]
            token: T.let[T.int32] = query_start[tree]
            head: T.let[T.int32] = items[item, 1]
            first_row: T.let[T.int32] = items[item, 2]
            num_rows: T.let[T.int32] = items[item, 3]
            first_key: T.let[T.int32] = items[item, 4]
            last_key: T.let[T.int32] = items[item, 5]
            partial: T.let[T.int32] = items[item, 6]
            last_start: T.let[T.int32] = items[item, 7]
            context: T.let[T.int32] = context_len[tree]

            # Values of 16 dimensions are a column of tiles, this far from the next.
            words_apart: T.let[T.int32] = block_size * (LANES // 2)

            q = T.alloc_buffer((ITEM_ROWS * query_steps * TILE_DEPTH,), "uint16")
            acc = T.alloc_buffer((ITEM_ROWS * d,), "float32")
            row_max = T.alloc_buffer((ITEM_ROWS,), "float32")
            row_sum = T.alloc_buffer((ITEM_ROWS * LANES,), "float32")
            scores = T.alloc_buffer((PAIR_ROWS * KEYS,), "float32")
            weights = T.alloc_buffer((PAIR_ROWS * KEYS,), "uint16")
            staged = T.alloc_buffer((d * KEYS // 2,), "uint32")
            tile_max = T.alloc_buffer((PAIR_ROWS,), "float32")
            decay = T.alloc_buffer((PAIR_ROWS,), "float32")
            key_at = T.alloc_buffer((UNITS,), "int64")
            value_at = T.alloc_buffer((STEPS,), "int64")
            staged_at = T.alloc_buffer((STEPS,), "int64")
            largest = T.alloc_buffer((LANES,), "uint32")
            config = T.alloc_buffer((16,), "int32")

            # Up to two row tiles are as high as needed, more are filled up with zeros.
            row_tiles: T.let[T.int32] = (num_rows + TILE_ROWS - 1) // TILE_ROWS
            amx_tiles.configure(
                blocks,
                config,
                T.min(num_rows, TILE_ROWS),
                T.Select(
                    num_rows > PAIR_ROWS,
                    T.int32(TILE_ROWS),
                    num_rows - T.Select(num_rows > TILE_ROWS, T.int32(TILE_ROWS), T.int32(0)),
                ),
            )
            for r in range(T.Select(num_rows > PAIR_ROWS, row_tiles * TILE_ROWS, num_rows)):
                start: T.let[T.int64] = row_start(
                    token, head, first_row + r, group, query_row_stride, query_head_stride
                )
                for c in range(chunks):
                    at: T.let[T.int32] = left_index(
                        r, c // STEP_UNITS, query_steps, c % STEP_UNITS * LANES
                    )
                    if r < num_rows:
                        for i in T.vectorized(LANES):
                            q[at + i] = query[start + c * LANES + i]
                    else:
                        for i in T.vectorized(LANES):
                            q[at + i] = T.uint16(0)
                    for i in T.vectorized(LANES):
                        acc[r * d + c * LANES + i] = T.float32(0)
                for i in T.vectorized(LANES):
                    row_sum[r * LANES + i] = T.float32(0)
            for r in range(ITEM_ROWS // LANES):
                for i in T.vectorized(LANES):
                    row_max[r * LANES + i] = T.float32(LOWEST)
            for r in range(PAIR_ROWS // LANES):
                for i in T.vectorized(LANES):
                    tile_max[r * LANES + i] = T.float32(LOWEST)
            for s in T.unroll(STEPS):
                staged_at[s] = T.int64(s * TILE_WORDS)

            @T.inline
            def scale_cap_mask(r0, rows, first, units):
                for r in range(rows):
                    for u in range(units):
                        if softcap > T.float32(0):
                            for i in T.vectorized(LANES):
                                scores[r * KEYS + u * LANES + i] = softcap * tanh(
                                    scores[r * KEYS + u * LANES + i] * scale
                                )
                        else:
                            for i in T.vectorized(LANES):
                                scores[r * KEYS + u * LANES + i] = (
                                    scores[r * KEYS + u * LANES + i] * scale
                                )
                # Units before this one hold nothing but committed tokens that all rows see.
                unit: T.let[T.int32] = T.Select(
                    first >= last_start, T.max(context - first, 0) // LANES, T.int32(0)
                )
                mask_scores(
                    scores,
                    rows,
                    T.min(unit, units),
                    units,
                    KEYS,
                    first_row + r0,
                    first,
                    tree,
                    group,
                    masks,
                    row_starts,
                    T.cast(words, "int32"),
                    context,
                    query_len[tree],
                )

            @T.inline
            def attend(block, row_tile, first, steps, direct, poisoned):
                r0: T.let[T.int32] = row_tile * TILE_ROWS
                rows: T.let[T.int32] = T.min(num_rows - r0, block.row_tiles * TILE_ROWS)
                factor: T.let[T.float32] = scale if direct else T.float32(1)
                score(block, q, cache, key_at, scores, row_tile, steps)
                if not direct:
                    scale_cap_mask(r0, rows, first, steps * STEP_UNITS)
                soften(
                    scores,
                    factor,
                    tile_max,
                    decay,
                    row_max,
                    row_sum,
                    acc,
                    weights,
                    block.row_tiles,
                    r0,
                    rows,
                    steps,
                )
                if direct:
                    weigh(block, weights, cache, value_at, words_apart, acc, row_tile, steps)
                else:
                    if poisoned:
                        weigh_carefully(weights, staged, acc, r0, rows, steps)
                    else:
                        weigh(
                            block,
                            weights,
                            staged,
                            staged_at,
                            STEPS * TILE_WORDS,
                            acc,
                            row_tile,
                            steps,
                        )

            @T.inline
            def attend_all(first, steps, direct, poisoned):
                for pair in range(row_tiles // 2):
                    attend(blocks.pair, pair * 2, first, steps, direct, poisoned)
                if row_tiles % 2 == 1:
                    attend(blocks.single, row_tiles - 1, first, steps, direct, poisoned)

            for tile_index in range((last_key - first_key + KEYS - 1) // KEYS):
                first: T.let[T.int32] = first_key + tile_index * KEYS
                count: T.let[T.int32] = T.min(last_key - first, KEYS)
                # The keys of a step never leave their block.
                for s in range(STEPS):
                    position: T.let[T.int32] = T.min(first + s * TILE_DEPTH, last_key - 1)
                    offset: T.let[T.int64] = T.cast(
                        position % block_size // TILE_DEPTH * TILE_DEPTH, "int64"
                    )
                    page: T.let[T.int64] = T.cast(table[tree, position // block_size], "int64")
                    base: T.let[T.int64] = (page * num_kv_heads + head) * block_size * d
                    for u in T.unroll(TILE_DEPTH // LANES):
                        key_at[2 * s + u] = base + (offset + u * LANES) * (d // 2)
                    value_at[s] = base + block_size * (d // 2) + offset * (LANES // 2)
                full: T.let[T.bool] = T.And(
                    first + KEYS <= T.min(context, last_key), first >= last_start
                )
                if T.And(full, softcap == T.float32(0)):
                    attend_all(first, STEPS, True, False)
                else:
                    steps: T.let[T.int32] = (count + TILE_DEPTH - 1) // TILE_DEPTH
                    stage(cache, value_at, words_apart, staged, largest, count, steps)
                    poisoned: T.let[T.bool] = T.And(
                        T.Not(full), largest[0] >= T.uint32(INFINITY_BITS)
                    )
                    attend_all(first, steps, False, poisoned)

            amx_tiles.release()
            finish(
                acc,
                row_max,
                row_sum,
                num_rows,
                token,
                head,
                first_row,
                group,
                partial,
                partial_sum,
                partial_stat,
                out,
                out_row_stride,
                out_head_stride,
            )

        merge_all(
            merges,
            num_merges,
            parallel_merge,
            query_start,
            group,
            partial_sum,
            partial_stat,
            out,
            out_row_stride,
            out_head_stride,
        )

    return tree_attention
