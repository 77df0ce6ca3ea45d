"""Results of work items, and the combination of those whose keys were split over threads."""

from tvm.script import tirx as T

from tvm_ops.kernels.vector_math import LANES, LOWEST, exp2, from_float32

ITEM_ROWS = 64  # rows of an item: bounds its scratch


def row_start(first_token, head, row, group, row_stride, head_stride):
    """Offset of a row that counts tree row x head of the group, in query or out."""
    token = T.cast(first_token + row // group, "int64")
    return token * row_stride + T.cast(head * group + row % group, "int64") * head_stride


def finish_op(dtype: str, d: int):
    """Piece that writes an item's rows to out, or unnormalised to partial result `partial` >= 0.

    acc: sums [row * d]; row_max: maxima; row_sum: weights in LANES parts a row.
    """

    @T.inline
    def finish(
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
    ):
        for r in range(num_rows):
            start: T.let[T.int64] = row_start(
                token, head, first_row + r, group, out_row_stride, out_head_stride
            )
            total = T.alloc_buffer((1,), "float32")
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

    return finish


def _merge_op(dtype: str, d: int):
    """Piece that writes the rows of merges[index] to out, exact but for rounding.

    Partial results are unnormalised sums with their maximum (base-2 logits) and total weight.
    """

    @T.inline
    def merge(
        merges,
        index,
        query_start,
        group,
        partial_sum,
        partial_stat,
        out,
        out_row_stride,
        out_head_stride,
    ):
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
            best = T.alloc_buffer((1,), "float32")
            total = T.alloc_buffer((1,), "float32")
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
                o = T.alloc_buffer((LANES,), "float32")
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

    return merge


def merge_all_op(dtype: str, d: int):
    """Piece that writes the rows of all merges to out, in parallel if `parallel` is not 0."""
    merge = _merge_op(dtype, d)

    @T.inline
    def merge_all(
        merges,
        num_merges,
        parallel,
        query_start,
        group,
        partial_sum,
        partial_stat,
        out,
        out_row_stride,
        out_head_stride,
    ):
        @T.inline
        def merge_one(index):
            merge(
                merges,
                index,
                query_start,
                group,
                partial_sum,
                partial_stat,
                out,
                out_row_stride,
                out_head_stride,
            )

        if parallel == 0:
            # A second parallel loop would wait for all threads once more, which on a busy machine
            # costs a time slice: not for little work.
            for index in range(num_merges):
                merge_one(index)
        else:
            for index in T.parallel(num_merges):
                merge_one(index)

    return merge_all
