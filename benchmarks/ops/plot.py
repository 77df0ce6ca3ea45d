"""Pictures of the ratios: ours over theirs against context, one line per number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

RIVALS = {"vllm": "vLLM's causal kernel", "sdpa": "torch SDPA, keys and values gathered before"}
BATCH_STYLES: dict[int, tuple[Any, str]] = {1: ("-", "o"), 8: ("--", "s")}
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0)

Records = Sequence[Mapping[str, Any]]


def plot(records: Records, directory: Path) -> list[Path]:
    """One picture per rival and number of threads; the files."""
    files = []
    for rival, title in RIVALS.items():
        for threads in sorted({record["threads"] for record in records}):
            path = directory / f"ratio_vs_{rival}_{threads}t.png"
            mine = [record for record in records if record["threads"] == threads]
            _picture(mine, rival, f"{title}, {threads} thread{'s' * (threads > 1)}", path)
            files.append(path)
    return files


def _picture(records: Records, rival: str, title: str, path: Path) -> None:
    kinds = list(dict.fromkeys((record["isa"], record["dtype"]) for record in records))
    dims = sorted({record["head_dim"] for record in records})
    rows = sorted({record["rows"] for record in records})
    contexts = sorted({record["context"] for record in records})
    colours = dict(
        zip(
            rows,
            plt.get_cmap("turbo")([0.06 + 0.9 * i / len(rows) for i in range(len(rows))]),
            strict=True,
        )
    )
    figure, axes = plt.subplots(
        len(kinds),
        len(dims),
        figsize=(5.2 * len(dims) + 1.4, 3.6 * len(kinds) + 0.9),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for (isa, dtype), line_of_axes in zip(kinds, axes, strict=True):
        for dim, axis in zip(dims, line_of_axes, strict=True):
            mine = [
                r for r in records if (r["isa"], r["dtype"], r["head_dim"]) == (isa, dtype, dim)
            ]
            for row in rows:
                for batch, (style, marker) in BATCH_STYLES.items():
                    points = sorted(
                        (r["context"], r["rivals"][rival]["ratio"])
                        for r in mine
                        if (r["rows"], r["batch"]) == (row, batch)
                    )
                    if points:
                        axis.plot(
                            *zip(*points, strict=True),
                            style,
                            marker=marker,
                            markersize=4,
                            linewidth=1.4,
                            color=colours[row],
                        )
            axis.axhline(1.0, color="black", linewidth=1.2)
            axis.set_title(f"{dtype}, head_dim {dim}, isa {isa}", fontsize=10)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.xaxis.set_major_locator(FixedLocator(contexts))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.yaxis.set_major_locator(FixedLocator(TICKS))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            axis.yaxis.set_minor_locator(NullLocator())
            axis.grid(alpha=0.25)
    figure.supxlabel("context, tokens", fontsize=10)
    figure.supylabel("time of tree_attention / theirs (below 1: ours is faster)", fontsize=10)
    figure.suptitle(f"tree_attention against {title}", fontsize=12)
    keys = [
        Line2D([], [], color=colours[row], label=f"{row} row{'s' * (row > 1)}", linewidth=2.5)
        for row in rows
    ]
    keys += [
        Line2D(
            [],
            [],
            color="grey",
            linestyle=style,
            marker=marker,
            markersize=4,
            label=f"batch {batch}",
        )
        for batch, (style, marker) in BATCH_STYLES.items()
    ]
    keys.append(Line2D([], [], color="black", label="equal"))
    figure.legend(handles=keys, loc="outside right center", fontsize=9, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
