"""What `medusa train` leaves to read: report.html with its plots, and the heads' model card."""

from __future__ import annotations

import base64
import html
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_plugin import __version__
from medusa_plugin.atomic_file import write_whole

if TYPE_CHECKING:
    from medusa_plugin.training.evaluate import HeldOut
    from medusa_plugin.training.fit import FitState
    from medusa_plugin.training.pipeline import HiddenStates, Plan

SIZES = (4, 8, 16, 32)
"""Rows of a verify pass, the root's included, that the tables show."""
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:50em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #bbb;padding:.3em .7em;"
    "text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    "code{overflow-wrap:anywhere}"
)

Table = Sequence[Sequence[str]]


def write_report(
    plan: Plan,
    command: str,
    source: str,
    data: HiddenStates,
    state: FitState,
    judged: HeldOut,
) -> list[Path]:
    """Write `report.html`, its plots as PNG files where matplotlib is there, and `README.md`.

    Args:
        plan: of the training.
        command: by which it was started.
        source: of the text.
        data: what was learnt from.
        state: how training ended.
        judged: what the heads are worth.

    Returns:
        The files.
    """
    facts = provenance(plan, command, source, data, state)
    tables = {
        "Tokens per step by size of the tree": yield_table(judged),
        "Accuracy by head": accuracy_table(judged),
        "Provenance": [("", ""), *facts.items()],
    }
    plots = _plots(plan.out, state, judged)
    page, card = plan.out / "report.html", plan.out / "README.md"
    write_whole(page, _page(plan, judged, tables, plots))
    write_whole(card, _card(plan, judged, tables))
    return [page, card, *plots.values()]


def provenance(
    plan: Plan, command: str, source: str, data: HiddenStates, state: FitState
) -> dict[str, str]:
    """Where the heads come from, as pairs to show."""
    import torch
    import torch.distributed as dist
    import transformers

    # The card goes with the heads: no directory of this machine is in it.
    model = Path(plan.model).name if Path(plan.model).is_dir() else plan.model
    for path, name in ((plan.model, model), (str(plan.out), plan.out.name)):
        command = command.replace(path, name)
    return {
        "command": command,
        "processes": str(dist.get_world_size() if dist.is_initialized() else 1),
        "model": model,
        "kind": f"{plan.shape.kind}, {plan.shape.num_heads} heads",
        "text": source,
        "training tokens": f"{data.train_tokens:,}",
        "held-out tokens": f"{data.held_out_tokens:,}",
        "seed": str(plan.fit.seed),
        "steps": f"{state.step:,} of {plan.batch_size:,} positions; the weights of step "
        f"{state.best_step:,} are kept",
        "ended": state.ended,
        "steps skipped for a gradient that was not finite": str(state.skipped_steps),
        "minutes of training": f"{state.seconds / 60:.1f}",
        "versions": f"vllm-medusa {__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "source revision": _revision(),
    }


def yield_table(judged: HeldOut) -> Table:
    """Tokens per step by rows of the verify pass."""
    rows = [size for size in SIZES if size <= len(judged.yields.simulated)]
    return [
        ("rows", *map(str, rows)),
        ("simulated", *(f"{judged.yields.simulated[size - 1]:.3f}" for size in rows)),
        ("expected", *(f"{judged.yields.expected[size - 1]:.3f}" for size in rows)),
    ]


def accuracy_table(judged: HeldOut) -> Table:
    """How often the true token is among a head's best, where its turn comes in a tree."""
    ranks = [rank for rank in (1, 2, 4, 8) if rank <= judged.accuracies.shape[1]]
    return [
        ("head", *(f"top {rank}" for rank in ranks)),
        *(
            (str(head + 1), *(f"{row[:rank].sum():.3f}" for rank in ranks))
            for head, row in enumerate(judged.accuracies)
        ),
    ]


def _revision() -> str:
    """Git revision of the source, where it is a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _plots(out: Path, state: FitState, judged: HeldOut) -> dict[str, Path]:
    """PNG files by title; none without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return {}
    evaluations = state.evaluations
    seen = [e.examples / 1e6 for e in evaluations]
    heads = range(len(evaluations[0].accuracy))
    sizes = range(1, len(judged.yields.simulated) + 1)
    panels: dict[str, tuple[str, str, str, Mapping[str, tuple[Any, Any]]]] = {
        "Loss": (
            "loss.png",
            "million positions",
            "weighted cross entropy",
            {
                "training": (seen, [e.train_loss for e in evaluations]),
                "held out": (seen, [e.loss for e in evaluations]),
            },
        ),
        "Accuracy by head": (
            "accuracy.png",
            "million positions",
            "held-out top 1, true tokens before",
            {f"head {h + 1}": (seen, [e.accuracy[h][0] for e in evaluations]) for h in heads},
        ),
        "Tokens per step by size of the tree": (
            "tokens_per_step.png",
            "rows of the verify pass",
            "tokens per step, held out",
            {
                "simulated": (sizes, judged.yields.simulated),
                "expected": (sizes, judged.yields.expected),
            },
        ),
    }
    files = {}
    for title, (name, x_label, y_label, lines) in panels.items():
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        axis = figure.subplots()
        for label, (x, y) in lines.items():
            axis.plot(x, y, marker=".", label=label)
        axis.set(xlabel=x_label, ylabel=y_label, title=title)
        axis.grid(alpha=0.3)
        axis.legend()
        files[title] = out / name
        figure.savefig(out / name, dpi=130)
    return files


def _summary(judged: HeldOut) -> str:
    return (
        f"Judged on {judged.answers} held-out answers ({judged.tokens:,} tokens): the trees are "
        "followed along the answer as an engine would, the target's own token included; a quarter "
        "of the answers is decoded, the others calibrate the heads' probabilities."
    )


def _page(plan: Plan, judged: HeldOut, tables: Mapping[str, Table], plots: dict[str, Path]) -> str:
    title = html.escape(f"{plan.shape.kind} heads for {Path(plan.model).name}")
    body = [f"<h1>{title}</h1><p>{html.escape(_summary(judged))}</p>"]
    for name, table in tables.items():
        body.append(f"<h2>{html.escape(name)}</h2><table>")
        for row in table:
            if any(row):
                cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
                body.append(f"<tr>{cells}</tr>")
        body.append("</table>")
    for name, file in plots.items():
        data = base64.b64encode(file.read_bytes()).decode()
        alt = html.escape(name)
        body.append(f'<h2>{alt}</h2><img alt="{alt}" src="data:image/png;base64,{data}">')
    if not plots:
        body.append("<p>No plots: they need matplotlib (pip install 'vllm-medusa[bench]').</p>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style>\n" + "\n".join(body) + "\n</html>\n"
    )


def _card(plan: Plan, judged: HeldOut, tables: Mapping[str, Table]) -> str:
    name = Path(plan.model).name
    lines = [
        f"# {plan.shape.kind} draft heads for {name}",
        "",
        "`vllm serve MODEL --speculative-model medusa --medusa-heads HEADS_DIR`, with the plugin "
        "vllm-medusa.",
        "",
        _summary(judged),
    ]
    for title, table in tables.items():
        lines += ["", f"## {title}", ""]
        for i, row in enumerate(table):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
            if i == 0:
                lines.append("|---" * len(row) + "|")
    return "\n".join(lines) + "\n"
