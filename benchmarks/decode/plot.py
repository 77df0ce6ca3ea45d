"""A picture of the results: speed-up over plain vLLM by batch, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from decode.report import label, stage_names

Records = Sequence[Mapping[str, Any]]


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw `results` to `path`: one panel per temperature, and one of stages."""
    cells, stages = results["cells"], results["stages"]
    temperatures = list(dict.fromkeys(cell["temperature"] for cell in cells))
    engines = list(dict.fromkeys(cell["engine"] for cell in cells))
    colours = {engine: f"C{i % 10}" for i, engine in enumerate(engines)}
    figure, axes = plt.subplots(
        1,
        len(temperatures) + 1,
        figsize=(4.6 * (len(temperatures) + 1), 4.4),
        squeeze=False,
        layout="constrained",
    )
    for temperature, axis in zip(temperatures, axes[0], strict=False):
        mine = [cell for cell in cells if cell["temperature"] == temperature]
        _speedups(axis, mine, [e for e in engines if e != "plain"], colours)
        axis.set_title("greedy" if temperature == 0 else f"temperature {temperature:g}")
    axes[0][0].set_ylabel("tokens per second over plain vLLM's")
    _stages(axes[0][-1], stages)
    figure.suptitle(
        f"{results['kind']} prompts, {results['mode']}, {results['dtype']}, "
        f"threads: {results['threads']}"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _speedups(
    axis: Axes, cells: Records, engines: Sequence[str], colours: Mapping[str, str]
) -> None:
    for engine in engines:
        mine = sorted((c for c in cells if c["engine"] == engine), key=lambda c: c["batch"])
        batches = [cell["batch"] for cell in mine]
        ratios = [cell["of_plain"] for cell in mine]
        axis.plot(
            batches,
            [ratio["median"] for ratio in ratios],
            marker="o",
            markersize=4,
            color=colours[engine],
            label=label(engine),
        )
        axis.fill_between(
            batches,
            [ratio["min"] for ratio in ratios],
            [ratio["max"] for ratio in ratios],
            color=colours[engine],
            alpha=0.15,
            linewidth=0,
        )
    axis.axhline(1.0, color="black", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(sorted({cell["batch"] for cell in cells})))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_xlabel("batch")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, frameon=False)


def _stages(axis: Axes, stages: Records) -> None:
    smallest = min((record["batch"] for record in stages), default=0)
    mine = [record for record in stages if record["batch"] == smallest]
    names = stage_names(mine)
    places = range(len(mine))
    bottoms = [0.0] * len(mine)
    shades = plt.get_cmap("tab20")
    for i, name in enumerate(names):
        heights = [record["milliseconds"].get(name, 0.0) for record in mine]
        axis.bar(places, heights, 0.7, bottoms, color=shades(i % 20), label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axis.set_xticks(list(places), [label(record["engine"]) for record in mine], rotation=30)
    axis.set_ylabel("milliseconds per decode step")
    axis.set_title(f"stages at batch {smallest}, greedy")
    axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
