"""Move tokens inside key-value caches on a GPU; a token's key and value are one run of words.

A thread owns the same words of every token, in one layer and KV head, and walks the moves in
order: what it reads was written by itself, so the moves are sequential without any barrier.

Before: addresses, slots and shapes were checked by the caller; nothing is checked here. Strides
count the uint32 words of gpu_words.py.
After: the moves with sources of at least 0 have been made one after the other.
"""

from typing import Any

from tvm.script import tirx as T

COMPACT_THREADS = 64


def compact_kv_all_kernel() -> Any:
    """TVM function for all layers in one launch, through an array of addresses (CUDA)."""

    @T.prim_func
    def compact_kv_all(
        caches_h: T.handle,
        source_h: T.handle,
        target_h: T.handle,
        block_stride: T.int64,
        head_stride: T.int64,
        token_stride: T.int64,
        num_layers: T.int32,
        kv_heads: T.int32,
        block_size: T.int32,
        token_words: T.int32,
        num_moves: T.int32,
    ):
        T.func_attr({"tirx.noalias": True, "global_symbol": "compact_kv"})
        layers = T.int64()
        moves = T.int64()
        caches = T.match_buffer(caches_h, (layers,), "int64", align=8)
        source = T.match_buffer(source_h, (moves,), "int64", align=8)
        target = T.match_buffer(target_h, (moves,), "int64", align=8)
        for by in T.thread_binding(num_layers, "blockIdx.y"):
            for bx in T.thread_binding(kv_heads, "blockIdx.x"):
                for tx in T.thread_binding(COMPACT_THREADS, "threadIdx.x"):
                    ptr: T.let[T.handle("uint32")] = T.reinterpret(
                        T.handle("uint32").ty, caches[by]
                    )
                    cache = T.decl_buffer((T.int64(1 << 46),), "uint32", data=ptr, align=4)
                    head: T.let[T.int64] = T.cast(bx, "int64") * head_stride
                    size: T.let[T.int64] = T.cast(block_size, "int64")
                    for m in range(num_moves):
                        if source[m] >= T.int64(0):
                            from_at: T.let[T.int64] = (
                                T.truncdiv(source[m], size) * block_stride
                                + T.truncmod(source[m], size) * token_stride
                                + head
                            )
                            to_at: T.let[T.int64] = (
                                T.truncdiv(target[m], size) * block_stride
                                + T.truncmod(target[m], size) * token_stride
                                + head
                            )
                            for c in range((token_words - tx + COMPACT_THREADS - 1) >> 6):
                                word: T.let[T.int64] = T.cast(tx + c * COMPACT_THREADS, "int64")
                                cache[to_at + word] = cache[from_at + word]

    return compact_kv_all


def compact_kv_layer_kernel(index: str = "int32"):
    """TVM function for one layer, plain buffers; slots are int32 (OpenCL, Metal, WebGPU)."""
    offset_type = getattr(T, index)

    @T.prim_func
    def compact_kv_layer(
        cache_h: T.handle,
        source_h: T.handle,
        target_h: T.handle,
        block_stride: offset_type,
        head_stride: offset_type,
        token_stride: offset_type,
        kv_heads: T.int32,
        block_size: T.int32,
        token_words: T.int32,
        num_moves: T.int32,
    ):
        T.func_attr({"tirx.noalias": True, "global_symbol": "compact_kv_layer"})
        size = offset_type()
        moves = offset_type()
        cache = T.match_buffer(cache_h, (size,), "uint32", align=4)
        source = T.match_buffer(source_h, (moves,), "int32", align=4)
        target = T.match_buffer(target_h, (moves,), "int32", align=4)
        for bx in T.thread_binding(kv_heads, "blockIdx.x"):
            for tx in T.thread_binding(COMPACT_THREADS, "threadIdx.x"):
                head: T.let[offset_type] = T.cast(bx, index) * head_stride
                for m in range(num_moves):
                    if source[m] >= 0:
                        from_at: T.let[offset_type] = (
                            T.cast(T.truncdiv(source[m], block_size), index) * block_stride
                            + T.cast(T.truncmod(source[m], block_size), index) * token_stride
                            + head
                        )
                        to_at: T.let[offset_type] = (
                            T.cast(T.truncdiv(target[m], block_size), index) * block_stride
                            + T.cast(T.truncmod(target[m], block_size), index) * token_stride
                            + head
                        )
                        for c in range((token_words - tx + COMPACT_THREADS - 1) >> 6):
                            word: T.let[offset_type] = T.cast(tx + c * COMPACT_THREADS, index)
                            cache[to_at + word] = cache[from_at + word]

    return compact_kv_layer
