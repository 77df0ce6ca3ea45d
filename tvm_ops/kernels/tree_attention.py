"""Tree attention for CPU vector units, over the paged cache layouts "vec" and "amx".

One work item is one tree, one KV head, one run of at most ITEM_ROWS query rows (tree row x head
of the group) and one run of keys. Its keys are visited in tiles that serve all rows of the item,
a register block at a time, with an online softmax (Milakov & Gimelshein, arXiv:1805.02867). Keys
are read where they are, unless converting them once for many rows is cheaper.

Before: items, merges and addresses were checked by the caller; nothing is checked here.
After: out holds the rows of every item; an item whose keys were split leaves its unnormalised
sum, maximum (base-2 logits) and weight in the partial buffers, and a merge combines them.
"""

from dataclasses import dataclass

from tvm.script import tirx as T

from tvm_ops.kernels.merge import ITEM_ROWS, finish_op, merge_all_op, row_start
from tvm_ops.kernels.tile_ops import (
    KEY_TILE,
    UNITS,
    Tile,
    cap_scores,
    mask_scores,
    score_op,
    softmax_op,
    unpack_op,
    weigh_op,
)
from tvm_ops.kernels.vector_math import (
    INFINITY_BITS,
    LANES,
    LOWEST,
    STORAGE_DTYPES,
    magnitude,
    to_float32,
)

# ruff: noqa: B023 (the inlined functions are expanded inside the loop whose variables they use)
_BLOCKS = ("main", "few", "one")


@dataclass(frozen=True)
class Schedule:
    """How a target runs the kernel.

    main: register block for most rows. few: for the last few.rows rows of an item or less.
    one: for a single row. unpack_rows: items with more rows convert 16-bit keys first.
    """

    main: Tile
    few: Tile
    one: Tile
    unpack_rows: int


class BlockOps:
    """The pieces of tile_ops for one register block."""

    def __init__(self, tile: Tile, dtype: str, head_dim: int, packed: bool) -> None:
        self.rows = tile.rows
        self.chunk = min(tile.dims, head_dim)
        self.rest = head_dim % self.chunk
        self.score = score_op(tile, dtype, head_dim, packed)
        self.weigh = weigh_op(tile.rows, self.chunk, dtype, head_dim, packed, False)
        self.weigh_rest = weigh_op(tile.rows, self.rest or LANES, dtype, head_dim, packed, False)
        self.weigh_carefully = weigh_op(1, LANES, dtype, head_dim, packed, True)


def tree_attention_kernel(layout: str, dtype: str, head_dim: int, schedule: Schedule):
    """TVM function for one layout ("vec" or "amx"), element type, head_dim and schedule."""
    amx = layout == "amx"
    stored = STORAGE_DTYPES[dtype]
    cache_dtype = "uint32" if amx else stored
    d = head_dim
    flat = T.int64(1 << 46)
    size = 4 if stored == "float32" else 2
    cache_size = 4 if amx else size
    direct, packed = (
        {name: BlockOps(getattr(schedule, name), dtype, d, is_packed) for name in _BLOCKS}
        for is_packed in (False, True)
    )
    # Keys in layout "amx" are always converted, float32 never.
    unpack_rows = 0 if amx else schedule.unpack_rows if size == 2 else 1 << 30
    scratch = LANES if unpack_rows > ITEM_ROWS else KEY_TILE * d
    unpack, softmax = unpack_op(amx, dtype, d), softmax_op(dtype)
    finish, merge_all = finish_op(dtype, d), merge_all_op(dtype, d)
    main_rows, few_rows = schedule.main.rows, schedule.few.rows
    padded_rows = ITEM_ROWS + main_rows

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
        query_ptr: T.let[T.handle(stored)] = T.reinterpret(T.handle(stored).ty, query_address)
        out_ptr: T.let[T.handle(stored)] = T.reinterpret(T.handle(stored).ty, out_address)
        cache_ptr: T.let[T.handle(cache_dtype)] = T.reinterpret(
            T.handle(cache_dtype).ty, cache_address
        )
        query = T.decl_buffer((flat,), stored, data=query_ptr, align=size)
        out = T.decl_buffer((flat,), stored, data=out_ptr, align=size)
        cache = T.decl_buffer((flat,), cache_dtype, data=cache_ptr, align=cache_size)

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

            q = T.alloc_buffer((padded_rows * d,), "float32")
            acc = T.alloc_buffer((padded_rows * d,), "float32")
            row_max = T.alloc_buffer((padded_rows,), "float32")
            row_sum = T.alloc_buffer((padded_rows * LANES,), "float32")
            keys = T.alloc_buffer((scratch,), "float32")
            values = T.alloc_buffer((scratch,), "float32")
            scores = T.alloc_buffer((main_rows * KEY_TILE,), "float32")
            decay = T.alloc_buffer((main_rows,), "float32")
            key_at = T.alloc_buffer((UNITS,), "int64")
            value_at = T.alloc_buffer((UNITS,), "int64")

            # Blocks of main_rows, and one smaller block if it can hold what is left.
            num_main: T.let[T.int32] = (num_rows + main_rows - 1 - few_rows) // main_rows
            left: T.let[T.int32] = num_rows - num_main * main_rows
            for r in range(T.max(num_main * main_rows, num_rows + few_rows - 1)):
                start: T.let[T.int64] = row_start(
                    token, head, first_row + r, group, query_row_stride, query_head_stride
                )
                for c in range(d // LANES):
                    if r < num_rows:
                        for i in T.vectorized(LANES):
                            q[r * d + c * LANES + i] = (
                                to_float32(query[start + c * LANES + i], dtype) * scale
                            )
                    else:
                        for i in T.vectorized(LANES):
                            q[r * d + c * LANES + i] = T.float32(0)
                    for i in T.vectorized(LANES):
                        acc[r * d + c * LANES + i] = T.float32(0)
                row_max[r] = T.float32(LOWEST)
                for i in T.vectorized(LANES):
                    row_sum[r * LANES + i] = T.float32(0)

            @T.inline
            def attend(ops, r0, first, count, full, poisoned):
                ops.score(q, keys, cache, key_at, scores, r0, count, block_size)
                if softcap > T.float32(0):
                    cap_scores(scores, ops.rows, softcap)
                if T.Not(full):
                    mask_scores(
                        scores,
                        ops.rows,
                        0,
                        UNITS,
                        KEY_TILE,
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
                softmax(scores, row_max, row_sum, decay, ops.rows, r0)
                if poisoned:
                    for r in range(ops.rows):
                        for c in range(d // LANES):
                            ops.weigh_carefully(
                                scores,
                                values,
                                cache,
                                value_at,
                                decay,
                                acc,
                                r0 + r,
                                r,
                                c * LANES,
                                count,
                            )
                else:
                    for c in range(d // ops.chunk):
                        ops.weigh(
                            scores,
                            values,
                            cache,
                            value_at,
                            decay,
                            acc,
                            r0,
                            0,
                            c * ops.chunk,
                            count,
                        )
                    if ops.rest > 0:
                        ops.weigh_rest(
                            scores,
                            values,
                            cache,
                            value_at,
                            decay,
                            acc,
                            r0,
                            0,
                            d - ops.rest,
                            count,
                        )

            @T.inline
            def largest_value(is_packed, count, largest):
                for j in range(count):
                    for c in range(d // LANES):
                        for i in T.vectorized(LANES):
                            if is_packed:
                                largest[i] = T.max(
                                    largest[i], magnitude(values[j * d + c * LANES + i])
                                )
                            else:
                                largest[i] = T.max(
                                    largest[i],
                                    magnitude(
                                        to_float32(
                                            cache[
                                                value_at[j // LANES] + j % LANES * d + c * LANES + i
                                            ],
                                            dtype,
                                        )
                                    ),
                                )

            @T.inline
            def attend_all(blocks, is_packed, first, count):
                full: T.let[T.bool] = T.And(first + KEY_TILE <= context, first >= last_start)
                largest = T.alloc_buffer((LANES,), "uint32")
                for i in T.vectorized(LANES):
                    largest[i] = T.uint32(0)
                if T.Not(full):
                    largest_value(is_packed, count, largest)
                    for i in range(LANES - 1):
                        largest[0] = T.max(largest[0], largest[i + 1])
                poisoned: T.let[T.bool] = largest[0] >= T.uint32(INFINITY_BITS)
                for b in range(num_main):
                    attend(blocks["main"], b * main_rows, first, count, full, poisoned)
                if left > 1:
                    attend(blocks["few"], num_main * main_rows, first, count, full, poisoned)
                if left == 1:
                    attend(blocks["one"], num_main * main_rows, first, count, full, poisoned)

            for tile_index in range((last_key - first_key + KEY_TILE - 1) // KEY_TILE):
                first: T.let[T.int32] = first_key + tile_index * KEY_TILE
                count: T.let[T.int32] = T.min(last_key - first, KEY_TILE)
                # A unit of LANES tokens never leaves its block.
                for u in range(UNITS):
                    position: T.let[T.int32] = T.min(first + u * LANES, last_key - 1)
                    offset: T.let[T.int64] = T.cast(position % block_size // LANES * LANES, "int64")
                    page: T.let[T.int64] = T.cast(table[tree, position // block_size], "int64")
                    base: T.let[T.int64] = (page * num_kv_heads + head) * block_size * (2 * d)
                    if amx:
                        key_at[u] = base // 2 + offset * (d // 2)
                        value_at[u] = base // 2 + block_size * (d // 2) + offset * (LANES // 2)
                    else:
                        key_at[u] = base + offset
                        value_at[u] = base + (block_size + offset) * d
                if amx:
                    unpack(cache, key_at, value_at, keys, values, count, block_size)
                    attend_all(packed, True, first, count)
                else:
                    if unpack_rows > ITEM_ROWS:
                        attend_all(direct, False, first, count)
                    else:
                        if num_rows > unpack_rows:
                            unpack(cache, key_at, value_at, keys, values, count, block_size)
                            attend_all(packed, True, first, count)
                        else:
                            attend_all(direct, False, first, count)

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
