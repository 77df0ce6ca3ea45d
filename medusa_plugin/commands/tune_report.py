"""What `medusa tune` shows: the fit, the costs, and speed by size of the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from medusa_plugin.training.calibrate import HeadFit
from medusa_plugin.training.tree_sizes import Yield
from medusa_plugin.tree.budget import StepCosts

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Tokens per second by the size of the tree, entry 0 without any."""

    batch: int
    expected: Floats
    simulated: Floats

    @property
    def best(self) -> int:
        """The size that is expected to be fastest."""
        return int(self.expected.argmax())


def fit_table(fits: Sequence[HeadFit], num_answers: int, num_held_out: int) -> Table:
    """Per head what the calibration is worth."""
    table = Table(title="Calibration: P(right) = sigmoid(bias + scale * logit p)")
    columns = ("head", "judged", "bias", "scale", "log loss", "calibrated", "error", "calibrated")
    for column in (*columns, "use"):
        table.add_column(column, justify="right")
    for head, fit in enumerate(fits):
        table.add_row(
            str(head),
            f"{fit.judged}+{fit.held_out}",
            f"{fit.fitted.bias:.3f}",
            f"{fit.fitted.scale:.3f}",
            *(f"{value:.4f}" for value in (*fit.log_loss, *fit.error)),
            "yes" if fit.calibration == fit.fitted else "no: not better",
        )
    table.caption = (
        f"{num_answers} answers, {num_held_out} of them held out; log loss (nats) and expected "
        "calibration error of a held-out candidate, before and after"
    )
    return table


def cost_table(costs: StepCosts) -> Table:
    """The measured cost curve."""
    table = Table(title="Cost of a step here")
    table.add_column("rows verified", justify="right")
    table.add_column("ms", justify="right")
    for rows, seconds in zip(costs.verify.rows, costs.verify.seconds, strict=True):
        table.add_row(str(rows), f"{1e3 * seconds:.1f}")
    table.caption = (
        f"heads at batch 1: {1e3 * costs.draft_seconds(1):.1f} ms; besides, each request: "
        f"{1e3 * costs.per_request:.1f} ms, each node: {1e3 * costs.per_node:.2f} ms"
    )
    return table


def size_table(curves: Sequence[Curve], costs: StepCosts) -> Table:
    """Tokens per second without trees and with the best size."""
    table = Table(title="Tokens/s by batch, all trees of one size, look-up apart")
    columns = ("batch", "no tree", "best size", "expected", "simulated", "speed-up")
    for column in columns:
        table.add_column(column, justify="right")
    for curve in curves:
        best = curve.best
        table.add_row(
            str(curve.batch),
            f"{curve.expected[0]:.1f}",
            str(best) if best else "none",
            f"{curve.expected[best]:.1f}",
            f"{curve.simulated[best]:.1f}",
            f"{curve.simulated[best] / curve.simulated[0]:.2f} x",
        )
    table.caption = (
        "on the held-out answers: expected by the calibrated probabilities, simulated by what the "
        f"target went on to say; beyond {costs.verify.rows[-1]} rows costs are extrapolated"
    )
    return table


def figures(
    fits: Sequence[HeadFit], yields: Yield, curves: Sequence[Curve], costs: StepCosts
) -> dict[str, Any]:
    """Everything that is shown, as JSON values."""
    return {
        "heads": [asdict(fit) for fit in fits],
        "tokens_per_step": {
            "expected": yields.expected.tolist(),
            "simulated": yields.simulated.tolist(),
        },
        "tokens_per_second": [
            {
                "batch": curve.batch,
                "best_size": curve.best,
                "expected": curve.expected.tolist(),
                "simulated": curve.simulated.tolist(),
            }
            for curve in curves
        ],
        "costs": {
            "rows": costs.verify.rows,
            "seconds": costs.verify.seconds,
            "draft_requests": costs.draft.rows,
            "draft_seconds": costs.draft.seconds,
            "seconds_per_request": costs.per_request,
            "seconds_per_node": costs.per_node,
        },
    }


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Draw the curves, one panel per batch.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 3
    rows = -(-len(curves) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    for axis, curve in zip(axes.flat, curves, strict=False):
        sizes = np.arange(len(curve.expected))
        axis.plot(sizes, curve.expected, label="expected")
        axis.plot(sizes, curve.simulated, "--", label="simulated")
        axis.plot(curve.best, curve.expected[curve.best], "o", color="C0")
        axis.annotate(
            f" {curve.best}", (curve.best, curve.expected[curve.best]), va="bottom", ha="left"
        )
        axis.set_title(f"batch {curve.batch}")
        axis.set_ylim(bottom=0)
    for axis in axes[-1]:
        axis.set_xlabel("nodes of a tree")
    for row in axes:
        row[0].set_ylabel("tokens/s")
    axes[0][0].legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
