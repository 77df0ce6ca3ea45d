"""Tree attention on the tensor cores of NVIDIA GPUs, sm_80 and later.

The kernel of gpu_tree_attention.py, same arguments, work division and partial results, with the
products done by mma.m16n8k16. A warp keeps 16 rows' queries, logits and sums in registers; keys
and values pass through shared memory, copied asynchronously: a tile's values while its logits are
computed, the next tile's keys while its values are summed. Rows of shared memory are padded by 16
bytes so that the 8 rows of an ldmatrix lie in different banks.

Registers of a fragment, with g = lane // 4 and t = lane % 4: of the left operand, rows g and g + 8,
dimensions 2t and 2t + 8; of the right one, dimensions 2t and 2t + 8 of column g; of the sums, rows
g and g + 8, columns 2t and 2t + 1.

Before: as in gpu_tree_attention.py, and the cache's address and strides are multiples of 16 bytes.
"""

from operator import add

from tvm.script import tirx as T

from tvm_ops.kernels.gpu_mma_ops import (
    SHORT_NAMES,
    is_special_op,
    mma_tile,
    multiply_op,
    over_quad,
    weigh_carefully_op,
)
from tvm_ops.kernels.gpu_tree_attention import key_offset, row_offset
from tvm_ops.kernels.gpu_words import (
    HIDDEN,
    LOWEST,
    TREE_CONTEXT,
    TREE_FIELDS,
    TREE_LAST,
    TREE_ROWS,
    cap_logit,
    sees,
    split_tiles,
)

# ruff: noqa: B023 (the inlined functions are expanded inside the loop whose variables they use)


def tree_attention_mma_kernel(dtype: str, head_dim: int):
    """TVM function for "float16" or "bfloat16" and a head_dim."""
    d, tile_of = head_dim, mma_tile(head_dim)
    if tile_of is None:
        raise ValueError(f"no tile for head_dim {d}")
    w, keys, threads, rows_of = d // 2, tile_of.keys, tile_of.threads, tile_of.rows
    pitch = w + 4  # words of a row in shared memory
    chunks = d // 8  # 16-byte pieces of a row
    per_key = threads // keys  # threads that copy one key
    steps, key_blocks = d // 16, keys // 8
    own = d // tile_of.dim_warps  # dimensions whose sums a warp keeps
    short = SHORT_NAMES[dtype]
    pack = T.ptx[f"cvt.rn.{short}x2.f32"]
    load = T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"]
    load_transposed = T.ptx["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"]
    copy16 = T.ptx["cp.async.cg.shared.global.L2::128B"]
    commit, wait = T.ptx["cp.async.commit_group"], T.ptx["cp.async.wait_group"]
    multiply, is_special = multiply_op(dtype), is_special_op(dtype)
    weigh_carefully = weigh_carefully_op(dtype, keys, own, pitch)
    value_base = keys * pitch  # values follow the keys in shared memory

    @T.prim_func
    def tree_attention_mma(
        query_h: T.handle,
        cache_h: T.handle,
        out_h: T.handle,
        trees_h: T.handle,
        masks_h: T.handle,
        first_visible_h: T.handle,
        table_h: T.handle,
        partial_h: T.handle,
        query_row_stride: T.int64,
        query_head_stride: T.int64,
        out_row_stride: T.int64,
        out_head_stride: T.int64,
        block_stride: T.int64,
        head_stride: T.int64,
        token_stride: T.int64,
        table_stride: T.int64,
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
        query_size = T.int64()
        cache_size = T.int64()
        out_size = T.int64()
        trees_size = T.int64()
        masks_size = T.int64()
        starts_size = T.int64()
        table_size = T.int64()
        partial_size = T.int64()
        query = T.match_buffer(query_h, (query_size,), "uint32", align=4)
        cache = T.match_buffer(cache_h, (cache_size,), "uint32", align=16)
        out = T.match_buffer(out_h, (out_size,), "uint32", align=4)
        trees = T.match_buffer(trees_h, (trees_size,), "int32", align=4)
        masks = T.match_buffer(masks_h, (masks_size,), "int32", align=4)
        first_visible = T.match_buffer(first_visible_h, (starts_size,), "int32", align=4)
        table = T.match_buffer(table_h, (table_size,), "int32", align=4)
        partial = T.match_buffer(partial_h, (partial_size,), "float32", align=4)

        for by in T.thread_binding(num_trees * kv_heads, "blockIdx.y"):
            for bx in T.thread_binding(row_tiles * splits, "blockIdx.x"):
                for tx in T.thread_binding(threads, "threadIdx.x"):
                    shared = T.alloc_buffer((2 * keys * pitch,), "uint32", scope="shared")
                    q = T.alloc_buffer((steps * 4,), "uint32", scope="local")
                    right = T.alloc_buffer((4,), "uint32", scope="local")
                    left = T.alloc_buffer((4,), "uint32", scope="local")
                    s = T.alloc_buffer((key_blocks * 4,), "float32", scope="local")
                    acc = T.alloc_buffer((own // 8 * 4,), "float32", scope="local")
                    # Of rows g and g + 8: maximum, weight, and what a tile does to them.
                    row_max = T.alloc_buffer((2,), "float32", scope="local")
                    row_sum = T.alloc_buffer((2,), "float32", scope="local")
                    best = T.alloc_buffer((2,), "float32", scope="local")
                    decay = T.alloc_buffer((2,), "float32", scope="local")
                    moved = T.alloc_buffer((2,), "uint32", scope="local")
                    bad = T.alloc_buffer((1,), "int32", scope="local")
                    slot = T.alloc_buffer((1,), "int64", scope="local")

                    tree: T.let[T.int32] = T.truncdiv(by, kv_heads)
                    head: T.let[T.int32] = T.truncmod(by, kv_heads)
                    first_row: T.let[T.int32] = T.truncdiv(bx, splits) * rows_of
                    split: T.let[T.int32] = T.truncmod(bx, splits)
                    rows: T.let[T.int32] = trees[tree * TREE_FIELDS + TREE_ROWS] * group
                    context: T.let[T.int32] = trees[tree * TREE_FIELDS + TREE_CONTEXT]
                    last_key: T.let[T.int32] = context + trees[tree * TREE_FIELDS + TREE_ROWS] - 1
                    last_start: T.let[T.int32] = trees[tree * TREE_FIELDS + TREE_LAST]
                    first_key, tiles, share = split_tiles(trees, tree, keys, splits)
                    count: T.let[T.int32] = T.Select(
                        first_row < rows, T.max(T.min(tiles - split * share, share), 0), 0
                    )
                    lane: T.let[T.int32] = tx % 32
                    warp: T.let[T.int32] = tx // 32
                    warp_row: T.let[T.int32] = warp // tile_of.dim_warps * 16
                    warp_dim: T.let[T.int32] = warp % tile_of.dim_warps * own

                    @T.inline
                    def locate(first):
                        slot[0] = key_offset(
                            table,
                            tree,
                            table_stride,
                            T.min(first + tx // per_key, last_key),
                            block_size,
                            head,
                            block_stride,
                            head_stride,
                            token_stride,
                            "int64",
                        )

                    @T.inline
                    def copy(to, offset):
                        for c in T.unroll(chunks // per_key):
                            chunk: T.let[T.int32] = tx % per_key + c * per_key
                            copy16(
                                T.address_of(shared[to + tx // per_key * pitch + chunk * 4]),
                                T.address_of(cache[slot[0] + T.cast(offset + chunk * 4, "int64")]),
                                16,
                            )
                        commit()

                    for i in T.unroll(own // 8 * 4):
                        acc[i] = T.float32(0)
                    for h in T.unroll(2):
                        row_max[h] = T.float32(LOWEST)
                        row_sum[h] = T.float32(0)
                    if count > 0:
                        for h in T.unroll(2):
                            # Rows beyond the last compute what nobody reads.
                            at: T.let[T.int64] = row_offset(
                                trees,
                                tree,
                                head,
                                T.min(first_row + warp_row + lane // 4 + h * 8, rows - 1),
                                group,
                                query_row_stride,
                                query_head_stride,
                                "int64",
                            ) + T.cast(lane % 4, "int64")
                            for k in T.unroll(steps):
                                q[k * 4 + h] = query[at + k * 8]
                                q[k * 4 + 2 + h] = query[at + (k * 8 + 4)]
                        locate(first_key + split * share * keys)
                        copy(0, 0)

                    for tile in range(count):
                        first: T.let[T.int32] = first_key + (split * share + tile) * keys
                        full: T.let[T.bool] = T.And(first + keys <= context, first >= last_start)
                        copy(value_base, w)
                        wait(1)
                        T.tvm_storage_sync("shared")

                        for i in T.unroll(key_blocks * 4):
                            s[i] = T.float32(0)
                        for k in T.unroll(steps):
                            for n in T.unroll(key_blocks // 2):
                                # Four 8 x 8 pieces: 2 x 8 keys of 2 x 8 dimensions.
                                load(
                                    right[0],
                                    right[1],
                                    right[2],
                                    right[3],
                                    T.address_of(
                                        shared[
                                            (n * 16 + lane // 16 * 8 + lane % 8) * pitch
                                            + k * 8
                                            + lane // 8 % 2 * 4
                                        ]
                                    ),
                                )
                                for h in T.unroll(2):
                                    multiply(s, (2 * n + h) * 4, q, k * 4, right, 2 * h)
                        # The next keys overwrite these, which all warps have read.
                        T.tvm_storage_sync("shared")
                        if tile + 1 < count:
                            locate(first + keys)
                            copy(0, 0)
                        else:
                            commit()  # an empty group, so that wait(1) means the values

                        for n in T.unroll(key_blocks * 4):
                            s[n] = cap_logit(s[n] * scale, softcap)
                        if T.Not(full):
                            for n in T.unroll(key_blocks):
                                for h in T.unroll(2):
                                    row: T.let[T.int32] = T.truncdiv(
                                        T.min(first_row + warp_row + lane // 4 + h * 8, rows - 1),
                                        group,
                                    )
                                    for e in T.unroll(2):
                                        seen: T.let[T.bool] = sees(
                                            masks,
                                            first_visible,
                                            tree,
                                            row,
                                            first + n * 8 + lane % 4 * 2 + e,
                                            context,
                                            mask_rows,
                                            mask_words,
                                        )
                                        s[n * 4 + h * 2 + e] = T.Select(
                                            seen, s[n * 4 + h * 2 + e], T.float32(HIDDEN)
                                        )
                        for h in T.unroll(2):
                            best[h] = row_max[h]
                            for n in T.unroll(key_blocks):
                                for e in T.unroll(2):
                                    best[h] = T.max(best[h], s[n * 4 + h * 2 + e])
                            over_quad(best, h, moved, T.max)
                            decay[h] = T.exp2(row_max[h] - best[h])
                            row_max[h] = best[h]
                            row_sum[h] = row_sum[h] * decay[h]
                            for n in T.unroll(key_blocks):
                                for e in T.unroll(2):
                                    s[n * 4 + h * 2 + e] = T.exp2(s[n * 4 + h * 2 + e] - best[h])
                                    row_sum[h] = row_sum[h] + s[n * 4 + h * 2 + e]
                        for i in T.unroll(own // 8):
                            for e in T.unroll(4):
                                acc[i * 4 + e] = acc[i * 4 + e] * decay[e // 2]
                        wait(1)
                        bad[0] = 0
                        if T.Not(full):
                            for c in T.unroll(chunks // per_key):
                                for i in T.unroll(4):
                                    is_special(
                                        shared[
                                            value_base
                                            + tx // per_key * pitch
                                            + (tx % per_key + c * per_key) * 4
                                            + i
                                        ],
                                        bad,
                                    )
                        bad[0] = T.cuda.syncthreads_or(bad[0])
                        if bad[0] == 0:
                            for k in T.unroll(keys // 16):
                                for h in T.unroll(4):
                                    pack(left[h], s[k * 8 + h * 2 + 1], s[k * 8 + h * 2])
                                for n in T.unroll(own // 16):
                                    # Four 8 x 8 pieces: 2 x 8 dimensions of 2 x 8 keys.
                                    load_transposed(
                                        right[0],
                                        right[1],
                                        right[2],
                                        right[3],
                                        T.address_of(
                                            shared[
                                                value_base
                                                + (k * 16 + lane % 16) * pitch
                                                + warp_dim // 2
                                                + n * 8
                                                + lane // 16 * 4
                                            ]
                                        ),
                                    )
                                    for h in T.unroll(2):
                                        multiply(acc, (2 * n + h) * 4, left, 0, right, 2 * h)
                        else:
                            weigh_carefully(
                                s, acc, shared, value_base + warp_dim // 2, lane, best, moved
                            )
                        # The next values overwrite these.
                        T.tvm_storage_sync("shared")

                    if count > 0:
                        for h in T.unroll(2):
                            over_quad(row_sum, h, moved, add)
                            local: T.let[T.int32] = warp_row + lane // 4 + h * 8
                            at: T.let[T.int64] = (
                                T.cast(by * (row_tiles * splits) + bx, "int64") * rows_of
                                + T.cast(local, "int64")
                            ) * (d + 2)
                            if first_row + local < rows:
                                if splits == 1:
                                    for i in T.unroll(own // 8):
                                        pack(
                                            right[0],
                                            acc[i * 4 + h * 2 + 1] / row_sum[h],
                                            acc[i * 4 + h * 2] / row_sum[h],
                                        )
                                        out[
                                            row_offset(
                                                trees,
                                                tree,
                                                head,
                                                first_row + local,
                                                group,
                                                out_row_stride,
                                                out_head_stride,
                                                "int64",
                                            )
                                            + T.cast(warp_dim // 2 + i * 4 + lane % 4, "int64")
                                        ] = right[0]
                                else:
                                    for i in T.unroll(own // 8):
                                        for e in T.unroll(2):
                                            partial[
                                                at
                                                + T.cast(
                                                    warp_dim + i * 8 + lane % 4 * 2 + e, "int64"
                                                )
                                            ] = acc[i * 4 + h * 2 + e]
                                    if T.And(lane % 4 == 0, warp_dim == 0):
                                        partial[at + d] = row_max[h]
                                        partial[at + (d + 1)] = row_sum[h]

    return tree_attention_mma
