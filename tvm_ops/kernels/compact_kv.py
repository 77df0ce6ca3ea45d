"""Move tokens inside the key-value caches of all layers, for the layouts "vec" and "amx".

Before: addresses, slots and shapes were checked by the caller; nothing is checked here.
After: the moves have been made one after the other, in every layer and head, keys and values.
"""

from tvm.script import tirx as T

from tvm_ops.kernels.vector_math import LANES


def compact_kv_kernel(layout: str, dtype: str):
    """TVM function for one layout ("vec" or "amx") and unsigned element type (bits are moved)."""
    amx = layout == "amx"
    flat = T.int64(1 << 46)
    size = 2 if dtype == "uint16" else 4

    @T.prim_func
    def compact_kv(
        caches_h: T.handle,
        source_h: T.handle,
        target_h: T.handle,
        num_kv_heads: T.int64,
        block_size: T.int64,
        head_dim: T.int64,
    ):
        T.func_attr({"tirx.noalias": True})
        num_layers = T.int64()
        num_moves = T.int64()
        caches = T.match_buffer(caches_h, (num_layers,), "int64", align=8)
        source = T.match_buffer(source_h, (num_moves,), "int64", align=8)
        target = T.match_buffer(target_h, (num_moves,), "int64", align=8)

        for item in T.parallel(num_layers * num_kv_heads):
            head: T.let[T.int64] = item % num_kv_heads
            ptr: T.let[T.handle(dtype)] = T.reinterpret(
                T.handle(dtype).ty, caches[item // num_kv_heads]
            )
            cache = T.decl_buffer((flat,), dtype, data=ptr, align=size)
            half: T.let[T.int64] = block_size * head_dim
            for move in range(num_moves):
                from_offset: T.let[T.int64] = source[move] % block_size
                to_offset: T.let[T.int64] = target[move] % block_size
                from_base: T.let[T.int64] = (
                    (source[move] // block_size * num_kv_heads + head) * 2 * half
                )
                to_base: T.let[T.int64] = (
                    (target[move] // block_size * num_kv_heads + head) * 2 * half
                )
                if amx:
                    # Keys: pairs of dims, 16 tokens side by side; values: pairs of tokens.
                    from_key: T.let[T.int64] = (
                        from_base + from_offset // 16 * 16 * head_dim + from_offset % 16 * 2
                    )
                    to_key: T.let[T.int64] = (
                        to_base + to_offset // 16 * 16 * head_dim + to_offset % 16 * 2
                    )
                    for pair in range(head_dim // 2):
                        cache[to_key + pair * 32] = cache[from_key + pair * 32]
                        cache[to_key + pair * 32 + 1] = cache[from_key + pair * 32 + 1]
                    from_value: T.let[T.int64] = (
                        from_base + half + from_offset // 2 * 32 + from_offset % 2
                    )
                    to_value: T.let[T.int64] = to_base + half + to_offset // 2 * 32 + to_offset % 2
                    for group in range(head_dim // 16):
                        for i in range(16):
                            cache[to_value + group * (block_size * 16) + i * 2] = cache[
                                from_value + group * (block_size * 16) + i * 2
                            ]
                else:
                    for k in range(head_dim):
                        cache[to_base + k * block_size + to_offset] = cache[
                            from_base + k * block_size + from_offset
                        ]
                    for c in range(head_dim // LANES):
                        for i in T.vectorized(LANES):
                            cache[to_base + half + to_offset * head_dim + c * LANES + i] = cache[
                                from_base + half + from_offset * head_dim + c * LANES + i
                            ]

    return compact_kv
