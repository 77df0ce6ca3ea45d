"""Times of the CUDA kernels beside torch's attention and a plain copy of the same bytes.

Run: make gpu-bench, or python benchmarks/bench_gpu_ops.py --out build/bench_gpu_ops

Prints no number if the result is wrong. Times are medians of interleaved runs between CUDA events.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tvm_ops import KVCacheGroup, TreeTables, compact_kv, tree_attention
from tvm_ops.layouts import read_rows
from tvm_ops.testing import error_and_bound, make_case

HEAD_DIM, KV_HEADS, GROUP, BLOCK_SIZE = 128, 8, 4, 16
ROWS, CONTEXTS, BATCHES = (1, 16, 64), (512, 4096, 32768), (1, 8)
ROUNDS, CALLS = 7, 20


def measure(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median microseconds a call of each run, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(ROUNDS):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000 / CALLS)
    return {name: statistics.median(values) for name, values in times.items()}


def attention(rows: int, context: int, batch: int) -> dict[str, Any]:
    """Tree attention against torch's SDPA with a mask on gathered keys and values."""
    case = make_case(
        layout="strided",
        dtype=torch.bfloat16,
        head_dim=HEAD_DIM,
        lens=[rows] * batch,
        contexts=[context] * batch,
        kv_heads=KV_HEADS,
        group=GROUP,
        block_size=BLOCK_SIZE,
    )
    query, cache, out = (t.cuda() for t in (case.query, case.kv_cache, case.out))
    tables = TreeTables(
        "cuda",
        num_blocks=cache.shape[0],
        block_size=BLOCK_SIZE,
        max_trees=batch,
        max_rows=rows,
        max_blocks=case.batch.block_table.shape[1],
    )
    tables.update(case.batch)
    tree_attention(query, cache, out, tables, **case.options)
    error, bound = error_and_bound(case, out.cpu())
    if not error <= bound:
        raise SystemExit(f"wrong result: error {error:.3g}, allowed {bound:.3g}; nothing measured")
    keys_of = torch.arange(context + rows)
    slots = case.batch.block_table[:, keys_of // BLOCK_SIZE].long() * BLOCK_SIZE
    slots = (slots + keys_of % BLOCK_SIZE).flatten().cuda()
    keys, values = read_rows(cache, "strided", slots)
    keys, values = (
        t.view(batch, context + rows, KV_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
        for t in (keys, values)
    )
    starts = case.batch.query_start.tolist()
    q = torch.stack([query[s : s + rows] for s in starts]).transpose(1, 2).contiguous()
    masks = case.batch.ancestor_masks[:, :, :1] >> torch.arange(rows) & 1
    committed = torch.ones(batch, rows, context, dtype=torch.bool)
    mask = torch.cat([committed, masks == 1], -1)[:, None].cuda()
    times = measure(
        {
            "tree_attention": lambda: tree_attention(query, cache, out, tables, **case.options),
            "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, enable_gqa=True
            ),
        }
    )
    read = batch * (context + rows) * KV_HEADS * 2 * HEAD_DIM * 2
    return {
        "rows": rows,
        "context": context,
        "batch": batch,
        "microseconds": times,
        "speedup_vs_sdpa": times["sdpa"] / times["tree_attention"],
        "gigabytes_per_second": read / times["tree_attention"] / 1000,
    }


def compaction(batch: int, moves: int = 4, layers: int = 32) -> dict[str, Any]:
    """Compaction against copying as many bytes that lie together."""
    caches = [
        torch.zeros(1024, KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        for _ in range(layers)
    ]
    group = KVCacheGroup(caches, "strided")
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(group.num_slots, generator=generator)[: 2 * batch * moves].cuda()
    source, target = slots[: batch * moves].clone(), slots[batch * moves :].clone()
    size = layers * batch * moves * KV_HEADS * 2 * HEAD_DIM * 2
    block, copy = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = measure(
        {"compact_kv": lambda: compact_kv(group, source, target), "copy": lambda: copy.copy_(block)}
    )
    return {
        "batch": batch,
        "bytes": size,
        "microseconds": times,
        "fraction_of_copy": times["copy"] / times["compact_kv"],
    }


def main(
    out: Annotated[Path, typer.Option(help="Folder for results.json.")] = Path(
        "build/bench_gpu_ops"
    ),
) -> None:
    """Measure the CUDA kernels on this machine's GPU. Example: make gpu-bench"""
    console = Console()
    if not torch.cuda.is_available():
        console.print("no GPU: torch sees no CUDA device, nothing was measured")
        raise typer.Exit(0)
    shapes = [(r, c, b) for r in ROWS for c in CONTEXTS for b in BATCHES]
    cases = [attention(*s) for s in track(shapes, "attention", console=Console(stderr=True))]
    moved = [compaction(batch) for batch in (1, 8, 64)]
    table = Table("rows", "context", "batch", "us", "SDPA us", "speed-up", "GB/s")
    for case in cases:
        micro = case["microseconds"]
        table.add_row(
            *(str(case[name]) for name in ("rows", "context", "batch")),
            *(f"{micro[name]:.1f}" for name in ("tree_attention", "sdpa")),
            f"{case['speedup_vs_sdpa']:.2f}",
            f"{case['gigabytes_per_second']:.0f}",
        )
    console.print(table)
    for case in moved:
        console.print(
            f"compaction, batch {case['batch']}: {case['microseconds']['compact_kv']:.1f} us, "
            f"{case['fraction_of_copy']:.2f} of a copy of as many bytes"
        )
    sha = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "command": sys.argv,
        "git": sha.stdout.strip(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    path.write_text(json.dumps({**about, "attention": cases, "compaction": moved}, indent=2))
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
