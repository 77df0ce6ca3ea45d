"""results.json as Markdown. Plain Python only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from record.markdown import circumstances_text, summary_table, table

Record = Mapping[str, Any]

LABELS = {
    "plain": "plain vLLM",
    "chain": "vLLM's chain Medusa",
    "ngram": "vLLM's n-gram",
    "suffix": "vLLM's suffix",
    "ours": "trees (ours)",
}


def section(results: Record) -> str:
    """Name of the section of the docs that these results fill: one per kind of prompts."""
    return f"bench_decode_{results['kind']}"


def markdown(results: Record) -> str:
    """Circumstances and tables."""
    parts = [
        _circumstances(results),
        summary_table(_single_figures(results["summary"])),
        _outputs(results),
    ]
    cells = results["cells"]
    for temperature in dict.fromkeys(cell["temperature"] for cell in cells):
        parts.append(_speed(temperature, [c for c in cells if c["temperature"] == temperature]))
    if results["stages"]:
        parts.append(_stages(results["stages"]))
    return "\n\n".join(parts)


def label(engine: str) -> str:
    """What an engine is called in tables and plots; variants go by their own name."""
    return LABELS.get(engine, engine)


def stage_names(stages: Sequence[Record]) -> list[str]:
    """Stages of any of the engines, the rest last."""
    names = dict.fromkeys(name for record in stages for name in record["milliseconds"])
    return sorted(names, key="rest".__eq__)


def _circumstances(results: Record) -> str:
    about = (
        f"{results['mode'].capitalize()}, {results['dtype']}; {results['num_prompts']} prompts "
        f"({results['kind']}), {results['max_tokens']} tokens each; repetitions: "
        f"{results['repetitions']}."
    )
    lines = [circumstances_text(results, about, f"Threads: {results['threads']}.")]
    if results["unfinished"]:
        lines.append(f"Unfinished: batch {results['unfinished']} was not measured.")
    return "\n".join(lines)


def _single_figures(summary: Record) -> dict[str, Any]:
    return {
        name: ", ".join(f"{key}: {entry}" for key, entry in value.items())
        if isinstance(value, Mapping)
        else value
        for name, value in summary.items()
        if value != {} and name not in ("speedup_by_engine", "speedup_by_batch_sampled")
    }


def _outputs(results: Record) -> str:
    rows = [[label(name), verdict] for name, verdict in results["outputs"].items()]
    rows += [[label(name), f"took no part: {why}"] for name, why in results["missing"].items()]
    return "Outputs in float32, compared with plain vLLM's:\n\n" + table(["engine", "output"], rows)


def _speed(temperature: float, cells: Sequence[Record]) -> str:
    engines = list(dict.fromkeys(cell["engine"] for cell in cells))
    batches = list(dict.fromkeys(cell["batch"] for cell in cells))
    by_place = {(cell["batch"], cell["engine"]): cell for cell in cells}
    others = [engine for engine in engines if engine != "plain"]
    speedups = [
        [batch, *(_spread(by_place.get((batch, e)), "of_plain") for e in others)]
        for batch in batches
    ]
    rates = [
        [batch, *(_rate(by_place.get((batch, engine))) for engine in engines)] for batch in batches
    ]
    return (
        f"Temperature {temperature:g}: tokens per second over plain vLLM's, median of the "
        "repetitions' ratios (least to greatest).\n\n"
        + table(["batch", *map(label, others)], speedups)
        + f"\n\nTemperature {temperature:g}: tokens per second of all requests, median (least to "
        "greatest), and tokens per step of a request.\n\n"
        + table(["batch", *map(label, engines)], rates)
    )


def _spread(cell: Record | None, name: str, digits: int = 2) -> str:
    if cell is None:
        return "-"
    values = cell[name]
    return "{:.{d}f} ({:.{d}f} to {:.{d}f})".format(
        values["median"], values["min"], values["max"], d=digits
    )


def _rate(cell: Record | None) -> str:
    if cell is None:
        return "-"
    return f"{_spread(cell, 'tokens_per_second', 1)}; {cell['tokens_per_step']:.2f}"


def _stages(stages: Sequence[Record]) -> str:
    smallest = min(record["batch"] for record in stages)
    mine = [record for record in stages if record["batch"] == smallest]
    names = stage_names(mine)
    rows = [
        [name, *(_milliseconds(record["milliseconds"].get(name)) for record in mine)]
        for name in names
    ]
    rows.append(["step", *(_milliseconds(sum(r["milliseconds"].values())) for r in mine)])
    rows.append(["overhead", *(f"{100 * r['overhead_fraction']:.1f} %" for r in mine)])
    return (
        f"Milliseconds of a decode step at batch {smallest}, greedy, by stage. Overhead is what is "
        "neither the target's forward pass nor its lm_head.\n\n"
        + table(["stage", *(label(record["engine"]) for record in mine)], rows)
    )


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
