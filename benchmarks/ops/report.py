"""results.json as Markdown. Plain Python only."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

BEGIN, END = "<!-- bench_ops:begin -->", "<!-- bench_ops:end -->"

Records = Sequence[Mapping[str, Any]]
_RIVALS = {
    "vllm": "vLLM, same isa",
    "sdpa": "SDPA, gathered before",
    "sdpa_gather": "SDPA, gather timed",
    "tvm": "TVM tree_attn_cpu",
}


def replace_section(document: str, text: str) -> str:
    """`document` with what is between its two markers replaced. Raises ValueError without them."""
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"expected {BEGIN} and {END} once each")
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def markdown(results: Mapping[str, Any]) -> str:
    """Circumstances and tables."""
    parts = [_circumstances(results), _summary(results["summary"]), _limits(results["limits"])]
    if results["attention"]:
        parts.append(_attention(results["attention"]))
    if results["compaction"]:
        parts.append(_compaction(results["compaction"]))
    return "\n\n".join(parts)


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _circumstances(results: Mapping[str, Any]) -> str:
    cpu = results["cpu"]
    flags = " ".join(flag for flag, has in cpu["flags"].items() if has)
    missing = " ".join(flag for flag, has in cpu["flags"].items() if not has)
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    state = " with uncommitted changes" if results["git_dirty"] else ""
    quick = " Only an eighth of the shapes (--quick)." if results["quick"] else ""
    threads = " and ".join(map(str, results["threads"]))
    lines = [
        f"`{results['command']}` at {results['git_sha'][:12]}{state}, {results['time']}.{quick}",
        f"{cpu['model']}: {flags}; without {missing or 'nothing'}. Threads: {threads}.",
        f"Versions: {versions}.",
        *(f"Note: {note}." for note in results["notes"]),
    ]
    return "\n".join(lines)


def _summary(summary: Mapping[str, Any]) -> str:
    rows = []
    for name, value in summary.items():
        if not name.endswith("_reason"):
            reason = summary.get(f"{name}_reason")
            rows.append([f"`{name}`", value if value is not None else f"none: {reason or 'n/a'}"])
    return _table(["figure", "value"], rows)


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
    return "Limits of the machine, measured in the same run:\n\n" + _table(head, rows)


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
        + _table([*keys, *map(str, contexts), "of limit"], ratios)
        + "\n\nHow many times faster than each: median (least).\n\n"
        + _table([*keys, *_RIVALS.values()], speedups)
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
    return "Compaction, 4 moves a request (batches 1 and 64):\n\n" + _table(head, rows)
