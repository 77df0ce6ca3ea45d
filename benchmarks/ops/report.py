"""results.json as Markdown. Plain Python only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from record.markdown import circumstances_text, summary_table, table

SECTION = "bench_ops"

Records = Sequence[Mapping[str, Any]]
_RIVALS = {
    "vllm": "vLLM, same isa",
    "sdpa": "SDPA, gathered before",
    "sdpa_gather": "SDPA, gather timed",
    "tvm": "TVM tree_attn_cpu",
}


def markdown(results: Mapping[str, Any]) -> str:
    """Circumstances and tables."""
    parts = [_circumstances(results), summary_table(results["summary"]), _limits(results["limits"])]
    if results["attention"]:
        parts.append(_attention(results["attention"]))
    if results["compaction"]:
        parts.append(_compaction(results["compaction"]))
    return "\n\n".join(parts)


def _circumstances(results: Mapping[str, Any]) -> str:
    quick = "Only an eighth of the shapes (--quick)." if results["quick"] else ""
    threads = f"Threads: {' and '.join(map(str, results['threads']))}."
    notes = [f"Note: {note}." for note in results["notes"]]
    return "\n".join([circumstances_text(results, quick, threads), *notes])


def _limits(limits: Records) -> str:
    levels = list(limits[0]["read"])
    head = ["threads", "fp32 FMA, GFLOP/s", *(f"read {x}, GB/s" for x in levels), "memcpy, GB/s"]
    rows = [
        [
            limit["threads"],
            limit["fma_fp32_gflops"],
            *(limit["read"][level]["gbps"] for level in levels),
            limit["memcpy_gbps"],
        ]
        for limit in limits
    ]
    return "Limits of the machine, measured in the same run:\n\n" + table(head, rows)


def _attention(records: Records) -> str:
    contexts = sorted({record["context"] for record in records})
    keys = ("isa", "dtype", "head_dim", "threads")
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record[key] for key in keys), []).append(record)
    ratios, speedups = [], []
    for group, mine in groups.items():
        limits = [record["fraction_of_limit"] for record in mine]
        cells = [_ratio_cell([r for r in mine if r["context"] == context]) for context in contexts]
        limit = f"{statistics.median(limits):.2f} ({max(limits):.2f})"
        ratios.append([*group, *cells, limit])
        speedups.append([*group, *(_speedup_cell(mine, rival) for rival in _RIVALS)])
    return (
        "Time of tree_attention over that of vLLM's kernel, by context: median (worst) over "
        "rows and batches; below 1 ours is faster. Last: share of the machine's limit, median "
        "(best).\n\n"
        + table([*keys, *map(str, contexts), "of limit"], ratios)
        + "\n\nHow many times faster than each: median (least).\n\n"
        + table([*keys, *_RIVALS.values()], speedups)
    )


def _rival_ratios(records: Records, rival: str) -> list[float]:
    return [r["rivals"][rival]["ratio"] for r in records if "ratio" in r["rivals"][rival]]


def _ratio_cell(records: Records) -> str:
    ratios = _rival_ratios(records, "vllm")
    return f"{statistics.median(ratios):.2f} ({max(ratios):.2f})" if ratios else "-"


def _speedup_cell(records: Records, rival: str) -> str:
    ratios = _rival_ratios(records, rival)
    return f"{1 / statistics.median(ratios):.2f} ({1 / max(ratios):.2f})" if ratios else "-"


def _compaction(records: Records) -> str:
    head = ["layers x heads x d", "layout", "dtype", "batch", "threads", "us", "GB/s"]
    head += ["of memcpy, same pieces", "of memcpy, rows", "of a step"]
    rows = [
        [
            f"{r['layers']} x {r['kv_heads']} x {r['head_dim']}",
            r["layout"],
            r["dtype"],
            r["batch"],
            r["threads"],
            f"{r['ours_us']:.1f}",
            f"{r['gbps']:.2f}",
            f"{1 / r['rivals']['same_pieces']['ratio']:.2f}",
            f"{1 / r['rivals']['row_pieces']['ratio']:.2f}",
            "-" if r["fraction_of_step"] is None else f"{100 * r['fraction_of_step']:.2f}%",
        ]
        for r in records
        if r["batch"] in (1, 64) or len(records) < 20
    ]
    return "Compaction, 4 moves a request (batches 1 and 64):\n\n" + table(head, rows)
