"""Tree attention for CPU vector units, over the paged cache layouts "vec" and "amx".

One work item is one tree, one KV head, one run of at most ITEM_ROWS query rows (tree row x head
of the group) and one run of keys. Its keys are visited in tiles. A tile is unpacked once to
float32 (keys [dim][token], values [token][dim]) and then serves all rows of the item, `rows`
of them at a time in registers, with an online softmax (Milakov & Gimelshein, arXiv:1805.02867).

Before: items, merges and addresses were checked by the caller; nothing is checked here.
After: out holds the rows of every item; an item whose keys were split leaves its unnormalised
sum, maximum (base-2 logits) and weight in the partial buffers, and a merge combines them.
"""

from dataclasses import dataclass

from tvm.script import tirx as T

from tvm_ops.kernels.vector_math import (
    INFINITY_BITS,
    LANES,
    LOWEST,
    STORAGE_DTYPES,
    add_weighted,
    exp2,
    from_float32,
    high_bfloat16,
    low_bfloat16,
    magnitude,
    sees,
    to_float32,
)

# ruff: noqa: B023 (the inlined functions are expanded inside the loop whose variables they use)
ITEM_ROWS = 64  # rows of an item: bounds its scratch
KEY_TILE = 64  # keys unpacked at a time; items begin at multiples of it


@dataclass(frozen=True)
class Tile:
    """Register blocks: `rows` query rows by `tokens` keys (scores) or `dims` dimensions (sums)."""

    rows: int
    tokens: int
    dims: int


def row_start(first_token, head, row, group, row_stride, head_stride):
    """Offset of a row that counts tree row x head of the group, in query or out."""
    token = T.cast(first_token + row // group, "int64")
    return token * row_stride + T.cast(head * group + row % group, "int64") * head_stride


def tree_attention_kernel(layout: str, dtype: str, head_dim: int, tile: Tile):
    """TVM function for one layout ("vec" or "amx"), element type, head_dim and register block."""
    amx = layout == "amx"
    stored = STORAGE_DTYPES[dtype]
    cache_dtype = "uint32" if amx else stored
    m, tile_tokens, d = tile.rows, KEY_TILE, head_dim
    units = tile_tokens // LANES
    block, block_units, chunk = tile.tokens, tile.tokens // LANES, tile.dims
    flat = T.int64(1 << 46)
    size = 4 if stored == "float32" else 2
    cache_size = 4 if amx else size

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
        items_h: T.handle,
        merges_h: T.handle,
        query_start_h: T.handle,
        query_len_h: T.handle,
        context_len_h: T.handle,
        masks_h: T.handle,
        block_table_h: T.handle,
        partial_sum_h: T.handle,
        partial_stat_h: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        num_items = T.int64()
        num_merges = T.int64()
        num_trees = T.int64()
        table_width = T.int64()
        table_stride = T.int64()
        num_partials = T.int64()
        items = T.match_buffer(items_h, (num_items, T.int64(8)), "int32", align=4)
        merges = T.match_buffer(merges_h, (num_merges, T.int64(8)), "int32", align=4)
        query_start = T.match_buffer(query_start_h, (num_trees,), "int32", align=4)
        query_len = T.match_buffer(query_len_h, (num_trees,), "int32", align=4)
        context_len = T.match_buffer(context_len_h, (num_trees,), "int32", align=4)
        masks = T.match_buffer(masks_h, (num_trees, T.int64(64)), "int64", align=8)
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
            context: T.let[T.int32] = context_len[tree]
            tree_rows: T.let[T.int32] = query_len[tree]

            q = T.alloc_buffer((ITEM_ROWS * d,), "float32")
            acc = T.alloc_buffer((ITEM_ROWS * d,), "float32")
            row_max = T.alloc_buffer((ITEM_ROWS,), "float32")
            row_sum = T.alloc_buffer((ITEM_ROWS * LANES,), "float32")
            keys = T.alloc_buffer((d * tile_tokens,), "float32")
            values = T.alloc_buffer((tile_tokens * d,), "float32")
            scores = T.alloc_buffer((m * tile_tokens,), "float32")
            decay = T.alloc_buffer((m,), "float32")

            for r in range((num_rows + m - 1) // m * m):
                start: T.let[T.int64] = row_start(
                    query_start[tree],
                    head,
                    first_row + r,
                    group,
                    query_row_stride,
                    query_head_stride,
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
            def unpack(first, count):
                # Keys and values of one 16-token unit at a time: a unit never leaves its block.
                for u in range((count + LANES - 1) // LANES):
                    position: T.let[T.int32] = first + u * LANES
                    offset: T.let[T.int64] = T.cast(position % block_size, "int64")
                    page: T.let[T.int64] = T.cast(table[tree, position // block_size], "int64")
                    base: T.let[T.int64] = (page * num_kv_heads + head) * block_size * (2 * d)
                    if amx:
                        key_base: T.let[T.int64] = base // 2 + offset * (d // 2)
                        value_base: T.let[T.int64] = (
                            base // 2 + block_size * (d // 2) + offset * (LANES // 2)
                        )
                        for pair in range(d // 2):
                            for i in T.vectorized(LANES):
                                keys[(2 * pair) * tile_tokens + u * LANES + i] = low_bfloat16(
                                    cache[key_base + pair * LANES + i]
                                )
                            for i in T.vectorized(LANES):
                                keys[(2 * pair + 1) * tile_tokens + u * LANES + i] = high_bfloat16(
                                    cache[key_base + pair * LANES + i]
                                )
                        for c in range(d // LANES):
                            words: T.let[T.int64] = value_base + c * (block_size * (LANES // 2))
                            for pair in T.unroll(LANES // 2):
                                for i in T.vectorized(LANES):
                                    values[(u * LANES + 2 * pair) * d + c * LANES + i] = (
                                        low_bfloat16(cache[words + pair * LANES + i])
                                    )
                                for i in T.vectorized(LANES):
                                    values[(u * LANES + 2 * pair + 1) * d + c * LANES + i] = (
                                        high_bfloat16(cache[words + pair * LANES + i])
                                    )
                    else:
                        for k in range(d):
                            for i in T.vectorized(LANES):
                                keys[k * tile_tokens + u * LANES + i] = to_float32(
                                    cache[base + k * block_size + offset + i], dtype
                                )
                        for j in range(LANES):
                            for c in T.unroll(d // LANES):
                                for i in T.vectorized(LANES):
                                    values[(u * LANES + j) * d + c * LANES + i] = to_float32(
                                        cache[base + (block_size + offset + j) * d + c * LANES + i],
                                        dtype,
                                    )

            @T.inline
            def score(r0, count):
                for n in range((count + block - 1) // block):
                    s = T.alloc_buffer((m * block,), "float32", scope="local")
                    for e in T.unroll(m * block_units):
                        for i in T.vectorized(LANES):
                            s[e * LANES + i] = T.float32(0)
                    for k in range(d):
                        for r in T.unroll(m):
                            for u in T.unroll(block_units):
                                for i in T.vectorized(LANES):
                                    s[r * block + u * LANES + i] = (
                                        s[r * block + u * LANES + i]
                                        + q[(r0 + r) * d + k]
                                        * keys[k * tile_tokens + n * block + u * LANES + i]
                                    )
                    for r in T.unroll(m):
                        for u in T.unroll(block_units):
                            for i in T.vectorized(LANES):
                                scores[r * tile_tokens + n * block + u * LANES + i] = s[
                                    r * block + u * LANES + i
                                ]

            @T.inline
            def mask_scores(r0, first):
                for r in range(m):
                    tree_row: T.let[T.int32] = T.min((first_row + r0 + r) // group, tree_rows - 1)
                    mask: T.let[T.int64] = masks[tree, tree_row]
                    for u in range(units):
                        for i in T.vectorized(LANES):
                            scores[r * tile_tokens + u * LANES + i] = T.Select(
                                sees(mask, first + u * LANES + i - context, tree_rows),
                                scores[r * tile_tokens + u * LANES + i],
                                T.float32(-float("inf")),
                            )

            @T.inline
            def softmax(r0):
                for r in range(m):
                    best = T.alloc_buffer((LANES,), "float32", scope="local")
                    for i in T.vectorized(LANES):
                        best[i] = scores[r * tile_tokens + i]
                    for u in T.unroll(units - 1):
                        for i in T.vectorized(LANES):
                            best[i] = T.max(best[i], scores[r * tile_tokens + (u + 1) * LANES + i])
                    before: T.let[T.float32] = row_max[r0 + r]
                    now: T.let[T.float32] = T.max(
                        before,
                        T.call_llvm_pure_intrin(
                            "float32", "llvm.vector.reduce.fmax", best[T.ramp(0, 1, LANES)]
                        ),
                    )
                    factor: T.let[T.float32] = exp2(before - now)
                    row_max[r0 + r] = now
                    decay[r] = factor
                    for i in T.vectorized(LANES):
                        row_sum[(r0 + r) * LANES + i] = row_sum[(r0 + r) * LANES + i] * factor
                    for u in T.unroll(units):
                        for i in T.vectorized(LANES):
                            scores[r * tile_tokens + u * LANES + i] = exp2(
                                scores[r * tile_tokens + u * LANES + i] - now
                            )
                        for i in T.vectorized(LANES):
                            row_sum[(r0 + r) * LANES + i] = (
                                row_sum[(r0 + r) * LANES + i]
                                + scores[r * tile_tokens + u * LANES + i]
                            )

            @T.inline
            def weigh(r0, count, masked):
                for c in range(d // chunk):
                    o = T.alloc_buffer((m * chunk,), "float32", scope="local")
                    for r in T.unroll(m):
                        for v in T.unroll(chunk // LANES):
                            for i in T.vectorized(LANES):
                                o[r * chunk + v * LANES + i] = T.float32(0)
                    for j in range(count):
                        for r in T.unroll(m):
                            for v in T.unroll(chunk // LANES):
                                for i in T.vectorized(LANES):
                                    o[r * chunk + v * LANES + i] = add_weighted(
                                        o[r * chunk + v * LANES + i],
                                        scores[r * tile_tokens + j],
                                        values[j * d + c * chunk + v * LANES + i],
                                        masked,
                                    )
                    for r in T.unroll(m):
                        for v in T.unroll(chunk // LANES):
                            for i in T.vectorized(LANES):
                                # Tile sums added up: less rounding than one long sum.
                                acc[(r0 + r) * d + c * chunk + v * LANES + i] = (
                                    acc[(r0 + r) * d + c * chunk + v * LANES + i] * decay[r]
                                    + o[r * chunk + v * LANES + i]
                                )

            for tile_index in range((last_key - first_key + tile_tokens - 1) // tile_tokens):
                first: T.let[T.int32] = first_key + tile_index * tile_tokens
                count: T.let[T.int32] = T.min(last_key - first, tile_tokens)
                unpack(first, count)
                if first + tile_tokens <= context:
                    for b in range((num_rows + m - 1) // m):
                        score(b * m, tile_tokens)
                        softmax(b * m)
                        weigh(b * m, tile_tokens, False)
                else:
                    largest = T.alloc_buffer((LANES,), "uint32", scope="local")
                    for i in T.vectorized(LANES):
                        largest[i] = T.uint32(0)
                    for e in range(count * (d // LANES)):
                        for i in T.vectorized(LANES):
                            largest[i] = T.max(largest[i], magnitude(values[e * LANES + i]))
                    for i in range(LANES - 1):
                        largest[0] = T.max(largest[0], largest[i + 1])
                    for b in range((num_rows + m - 1) // m):
                        score(b * m, count)
                        mask_scores(b * m, first)
                        softmax(b * m)
                        if largest[0] < T.uint32(INFINITY_BITS):
                            weigh(b * m, count, False)
                        else:
                            weigh(b * m, count, True)

            for r in range(num_rows):
                start: T.let[T.int64] = row_start(
                    token, head, first_row + r, group, out_row_stride, out_head_stride
                )
                total = T.alloc_buffer((1,), "float32", scope="local")
                total[0] = T.float32(0)
                for i in range(LANES):
                    total[0] = total[0] + row_sum[r * LANES + i]
                if partial >= 0:
                    partial_stat[partial, r, 0] = row_max[r]
                    partial_stat[partial, r, 1] = total[0]
                    for c in range(d // LANES):
                        for i in T.vectorized(LANES):
                            partial_sum[partial, r, c * LANES + i] = acc[r * d + c * LANES + i]
                else:
                    inverse: T.let[T.float32] = T.float32(1) / total[0]
                    for c in range(d // LANES):
                        for i in T.vectorized(LANES):
                            out[start + c * LANES + i] = from_float32(
                                acc[r * d + c * LANES + i] * inverse, dtype
                            )

        # On the calling thread: the work is small, and a second parallel loop would wait for all
        # threads once more, which on a busy machine costs a time slice.
        for index in range(num_merges):
            token: T.let[T.int32] = query_start[merges[index, 0]]
            head: T.let[T.int32] = merges[index, 1]
            first_row: T.let[T.int32] = merges[index, 2]
            num_rows: T.let[T.int32] = merges[index, 3]
            first: T.let[T.int32] = merges[index, 4]
            count: T.let[T.int32] = merges[index, 5]
            for r in range(num_rows):
                start: T.let[T.int64] = row_start(
                    token, head, first_row + r, group, out_row_stride, out_head_stride
                )
                best = T.alloc_buffer((1,), "float32", scope="local")
                total = T.alloc_buffer((1,), "float32", scope="local")
                best[0] = T.float32(LOWEST)
                for p in range(count):
                    best[0] = T.max(best[0], partial_stat[first + p, r, 0])
                total[0] = T.float32(0)
                for p in range(count):
                    total[0] = total[0] + partial_stat[first + p, r, 1] * exp2(
                        partial_stat[first + p, r, 0] - best[0]
                    )
                inverse: T.let[T.float32] = T.float32(1) / total[0]
                for c in range(d // LANES):
                    o = T.alloc_buffer((LANES,), "float32", scope="local")
                    for i in T.vectorized(LANES):
                        o[i] = T.float32(0)
                    for p in range(count):
                        weight: T.let[T.float32] = (
                            exp2(partial_stat[first + p, r, 0] - best[0]) * inverse
                        )
                        for i in T.vectorized(LANES):
                            o[i] = o[i] + partial_sum[first + p, r, c * LANES + i] * weight
                    for i in T.vectorized(LANES):
                        out[start + c * LANES + i] = from_float32(o[i], dtype)

    return tree_attention
