"""What tree_attention is compared with: vLLM's kernel, torch's SDPA, TVM's tree_attn_cpu.

Each rival is a call bound to one case, and the tensor [rows of all trees, heads, head_dim] that it
writes. All cases are equal chains, so that vLLM's causal kernel does the same work.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vllm import _custom_ops as vllm_ops

from ops.shapes import AttentionShape
from ops.timing import Call, clock
from tvm_ops.layouts import read_rows
from tvm_ops.load import warm_up
from tvm_ops.testing import AttentionCase, tree_rows


@dataclass(frozen=True)
class Rival:
    """A call, where its result is after a call, and what else to record."""

    call: Call
    result: Callable[[], Tensor]
    notes: dict[str, object]


def chain_query(case: AttentionCase) -> Tensor:
    """The rows of all chains, without the rows between them: contiguous."""
    query: Tensor = case.query[tree_rows(case.batch, len(case.query))]
    return query.contiguous()


def gather(case: AttentionCase, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, context + rows, kv_heads, head_dim] of all chains, as copies."""
    block_size = case.kv_cache.shape[2]
    position = torch.arange(shape.context + shape.rows)
    block = case.batch.block_table[:, position // block_size].long()
    slots = (block * block_size + position % block_size).flatten()
    keys, values = read_rows(case.kv_cache, case.layout, slots)
    sizes = (shape.batch, -1, *keys.shape[1:])
    return keys.view(sizes), values.view(sizes)


def vllm_causal(case: AttentionCase, isa: str) -> Rival:
    """vLLM's own kernel on the same cache, planned for the current number of threads."""
    num_blocks, kv_heads, block_size, width = case.kv_cache.shape
    head_dim = width // 2
    query = chain_query(case)
    out = torch.empty_like(query)
    lens = case.batch.query_len
    query_start_loc = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0).int()])
    seq_lens = case.batch.context_len + lens
    keys, values = case.kv_cache.view(num_blocks, kv_heads, 2 * block_size, head_dim).chunk(2, 2)
    plan = vllm_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lens),
        num_heads=query.shape[1],
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        seq_lens=seq_lens,
        dtype=query.dtype,
        query_start_loc=query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    arguments: dict[str, Any] = {
        "query": query,
        "key_cache": keys,
        "value_cache": values,
        "output": out,
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "scale": case.scale,
        "causal": True,
        "alibi_slopes": None,
        "sliding_window": -1,
        "block_table": case.batch.block_table,
        "softcap": 0,
        "scheduler_metadata": plan,
        "s_aux": None,
    }
    return Rival(lambda: vllm_ops.cpu_attention_with_kv_cache(**arguments), lambda: out, {})


def sdpa(case: AttentionCase, shape: AttentionShape) -> tuple[Rival, Rival]:
    """torch's SDPA under a boolean mask: with keys and values at hand, and gathering them first.

    Where they are at hand, heads are shared inside SDPA or were repeated before, whichever is
    faster; repeating is not timed. Where they are gathered, heads are shared.
    """
    keys, values = (x.transpose(1, 2).contiguous() for x in gather(case, shape))
    query = chain_query(case).view(shape.batch, shape.rows, shape.heads, -1).transpose(1, 2)
    query = query.contiguous()
    row, position = torch.arange(shape.rows)[:, None], torch.arange(shape.context + shape.rows)
    mask = position <= shape.context + row
    results: dict[str, Tensor] = {}

    def attend(name: str, keys: Tensor, values: Tensor, share: bool) -> None:
        results[name] = scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=case.scale, enable_gqa=share
        )

    all_keys, all_values = (x.repeat_interleave(shape.group, 1) for x in (keys, values))
    ways: dict[str, Call] = {
        "shared": lambda: attend("at hand", keys, values, True),
        "repeated": lambda: attend("at hand", all_keys, all_values, False),
    }
    taken = {}
    for name, call in ways.items():
        clock(call)
        taken[name] = min(clock(call) for _ in range(3))
    way = min(taken, key=taken.__getitem__)

    def gather_and_attend() -> None:
        keys, values = gather(case, shape)
        attend("gathered", keys.transpose(1, 2), values.transpose(1, 2), True)

    def rows_of(name: str) -> Callable[[], Tensor]:
        return lambda: results[name].transpose(1, 2).flatten(0, 1)

    return (
        Rival(ways[way], rows_of("at hand"), {"heads": way}),
        Rival(gather_and_attend, rows_of("gathered"), {"heads": "shared"}),
    )


class TvmTreeAttention:
    """TVM's tree_attn_cpu, compiled by a child process; serial code, float32."""

    def __init__(self, shapes: Iterable[AttentionShape]) -> None:
        variants = {f"{s.kv_heads}:{s.heads}:{s.head_dim}" for s in shapes}
        self.functions: dict[str, Callable[..., Any]] = {}
        # Loading one of our kernels binds our launcher, which gives scratch memory to theirs too:
        # TVM's runtime stays out of this process.
        warm_up("vec", torch.float32, 64)
        with tempfile.TemporaryDirectory() as directory:
            compiler = Path(__file__).with_name("tvm_tree_attention.py")
            subprocess.run(
                [sys.executable, str(compiler), directory, *sorted(variants)], check=True
            )
            for variant in variants:
                path = Path(directory) / f"{variant.replace(':', '-')}.so"
                self.functions[variant] = tvm_ffi.load_module(str(path))["tree_attn_cpu"]

    def bind(self, case: AttentionCase, shape: AttentionShape) -> Rival:
        """The kernel on the keys and values of `case`, gathered before: it knows no pages."""
        function = self.functions[f"{shape.kv_heads}:{shape.heads}:{shape.head_dim}"]
        query = chain_query(case)
        keys, values = (x.flatten(0, 1).contiguous() for x in gather(case, shape))
        out, logsumexp = torch.empty_like(query), torch.empty(query.shape[:2])
        trees = torch.arange(shape.batch + 1, dtype=torch.int32)
        # A row sees those whose interval in preorder holds its own start: all before it in a chain.
        order = torch.arange(shape.rows, dtype=torch.int32).repeat(shape.batch)
        intervals = torch.stack([order, torch.full_like(order, shape.rows)], 1)
        arguments = (
            query,
            trees * shape.rows,
            keys,
            values,
            trees * (shape.context + shape.rows),
            torch.zeros(len(query), dtype=torch.int32),  # positions, for RoPE
            trees * shape.rows,
            intervals,
            out,
            logsumexp,
            0,  # no RoPE: our keys are rotated already
            1.0,
            10000.0,
            case.scale,
        )
        return Rival(lambda: function(*arguments), lambda: out, {})
