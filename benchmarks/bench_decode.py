"""Time decoding: plain vLLM, its own chain Medusa, n-gram and suffix speculation, and our trees.

The engines run side by side and take turns, all with the same settings and prompts. Numbers appear
only after every engine of ours gave plain vLLM's tokens in float32; if one does not, the exit code
is 2. See docs/performance.md for how to read the results.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from decode.engines import (
    NAMES,
    Contender,
    ContenderError,
    Setup,
    contenders,
    parse_variant,
    static_trees,
)
from decode.identity import OutputsDifferError
from decode.measure import Engines, MemoryShortError, Plan, compare_outputs, measure, start
from decode.prompts import KINDS
from decode.report import markdown, section
from decode.results import Run, StageTimes, cells, summarise
from record.markdown import replace_section
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from medusa_plugin.commands.demo import Mode
from medusa_plugin.commands.prompts import PromptsError, read_prompts
from medusa_plugin.embedded import (
    EmbeddedModelError,
    embedded_heads_path,
    ensure_embedded_model,
)
from medusa_plugin.vllm_glue.offline_engine import EngineProcessError

# Every child imports this file, and reads the number of threads when it imports torch: so torch is
# imported here by nothing at the top.

EXAMPLES = """Examples:

\b
python benchmarks/bench_decode.py                      # everything, on a machine left alone
python benchmarks/bench_decode.py --kind edit
python benchmarks/bench_decode.py --mode eager --batches 1,2 --max-tokens 16 --repetitions 1
python benchmarks/bench_decode.py --engines ours --static-sizes 3,5,7,15
python benchmarks/bench_decode.py --variant 'wide={"num_speculative_tokens": 15}'
python benchmarks/bench_decode.py --markdown build/bench_decode/results.json
python benchmarks/bench_decode.py --markdown build/bench_decode/results.json \\
  --into docs/performance.md
"""
RESULTS, PICTURE = "results.json", "speedup.png"
console = Console(stderr=True)
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Kind(StrEnum):
    """Built-in prompts."""

    CHAT = "chat"
    EDIT = "edit"


@app.command(help=__doc__, epilog=EXAMPLES)
def main(
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts to ask instead: one a line, or JSON lines with `turns`, of which the "
            "first is asked.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    kind: Annotated[Kind, typer.Option(help="Built-in prompts: questions, or texts to edit.")] = (
        Kind.CHAT
    ),
    engines: Annotated[
        str, typer.Option(help="Who takes part beside plain, comma-separated.")
    ] = ",".join(NAMES[1:]),
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Ours with other options, as NAME=JSON; may be repeated."),
    ] = None,
    static_sizes: Annotated[
        str, typer.Option(help="Ours with the best fixed tree of each size, e.g. 3,5,7,15.")
    ] = "",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,2,4,8,16,32",
    temperatures: Annotated[str, typer.Option(help="Comma-separated; 0 is greedy.")] = "0,0.8",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of every answer.")] = 96,
    repetitions: Annotated[int, typer.Option(min=1, help="Times all is asked.")] = 3,
    mode: Annotated[Mode, typer.Option(help="How vLLM runs the model.")] = Mode.COMPILED,
    dtype: Annotated[str, typer.Option(help="Element type of the timed part.")] = "bfloat16",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of each engine; by default one per processor.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Default: the embedded model.", file_okay=False)
    ] = None,
    heads: Annotated[
        Path | None, typer.Option(help="Default: the embedded heads.", file_okay=False)
    ] = None,
    chain_heads: Annotated[
        Path | None,
        typer.Option(
            help="Plain Medusa heads for vLLM's own chain, which can run no others (medusa train "
            "--kind medusa). Default: those of --heads.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for results.json and the plot.")] = Path(
        "build/bench_decode"
    ),
    markdown_file: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            help="Measure nothing: print this results.json as tables.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            help="With --markdown: replace the tables in this file.", exists=True, dir_okay=False
        ),
    ] = None,
) -> None:
    if markdown_file is not None:
        print_markdown(json.loads(markdown_file.read_text()), into)
        return
    if into is not None:
        raise typer.BadParameter("--into goes with --markdown: it measures nothing")
    try:
        asked = tuple(c[0] for c in read_prompts(prompts)) if prompts else KINDS[kind]
        plan = Plan(
            asked,
            numbers(batches, "--batches", int, 1),
            numbers(temperatures, "--temperatures", float, 0),
            max_tokens,
            repetitions,
        )
        own = [parse_variant(text, heads or embedded_heads_path()) for text in variant or ()]
        if static_sizes:
            sizes = numbers(static_sizes, "--static-sizes", int, 1)
            own += static_trees(heads or embedded_heads_path(), sizes)
        out.mkdir(parents=True, exist_ok=True)
        for name in (RESULTS, PICTURE):  # an older run's must not pass for this one's
            (out / name).unlink(missing_ok=True)
        setup = Setup(
            model=model or ensure_embedded_model(),
            heads=heads or embedded_heads_path(),
            eager=mode is Mode.EAGER,
            dtype=dtype,
            threads=threads or len(os.sched_getaffinity(0)),
            max_num_seqs=max(plan.batches),
            chain_heads=chain_heads,
        )
        names = [name for name in engines.split(",") if name]
        settings = {"kind": "file" if prompts else kind.value, "mode": mode.value}
        run(names, own, setup, plan, out, settings)
    except (ContenderError, PromptsError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    except OutputsDifferError as error:
        console.print(f"No numbers: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except (EmbeddedModelError, EngineProcessError, MemoryShortError) as error:
        console.print(str(error), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def print_markdown(results: dict[str, Any], into: Path | None) -> None:
    text = markdown(results)
    if into is None:
        print(text)
        return
    try:
        into.write_text(replace_section(into.read_text(), section(results), text))
    except ValueError as error:
        raise typer.BadParameter(f"--into {into}: {error}") from None


def numbers(text: str, option: str, kind: Callable[[str], Any], least: int) -> tuple[Any, ...]:
    """Different numbers out of `text`, comma-separated, each at least `least`."""
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < least or len(set(found)) != len(found):
        raise typer.BadParameter(
            f"{option} {text}: expected different numbers from {least} on, comma-separated"
        )
    return found


def run(
    names: list[str],
    variants: list[Contender],
    setup: Setup,
    plan: Plan,
    out: Path,
    settings: dict[str, Any],
) -> None:
    """Compare, measure and write; what was measured is written after every batch size."""
    from record.circumstances import circumstances

    facts = circumstances()  # before the run: the tree may change under it
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        takers, missing = contenders(names, variants, setup, scratch)
        outputs = compare_outputs(takers, missing, setup, plan, console.print)
        results = {
            **facts,
            **settings,
            "dtype": setup.dtype,
            "threads": setup.threads,
            "max_tokens": plan.max_tokens,
            "repetitions": plan.repetitions,
            "num_prompts": len(plan.prompts),
            "prompts": plan.prompts,
            "engines": {taker.name: taker.options for taker in takers},
            "outputs": outputs,
            "missing": missing,
        }
        engines = start(stack, takers, missing, setup, console.print)
        _measure(engines, plan, results, out)
    console.print(f"written: {out / RESULTS} {out / PICTURE}", soft_wrap=True)
    print(json.dumps(results["summary"], indent=1))


def _measure(engines: Engines, plan: Plan, results: dict[str, Any], out: Path) -> None:
    runs: list[Run] = []
    stages: list[StageTimes] = []
    left = list(plan.batches)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    # Drawn twice a second: the bar's own thread should cost nothing.
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        task = progress.add_task("measuring", total=plan.num_requests(len(engines)))
        for batch, new_runs, new_stages in measure(engines, plan, lambda: progress.advance(task)):
            runs += new_runs
            stages += new_stages
            left.remove(batch)
            summary = summarise(runs, stages, results["missing"])
            results |= {
                "unfinished": ", ".join(map(str, left)),
                "summary": summary,
                "cells": cells(runs),
                "stages": [asdict(times) for times in stages],
                "runs": [asdict(one) for one in runs],
            }
            write(results, out)
            ratios = {e: r.get(str(batch)) for e, r in summary["speedup_by_engine"].items()}
            progress.console.print(f"batch {batch}, of plain: {ratios}", soft_wrap=True)


def write(results: dict[str, Any], out: Path) -> None:
    """results.json and speedup.png; the former is never half written."""
    from decode.plot import plot

    unfinished = out / f"{RESULTS}.part"
    unfinished.write_text(json.dumps(results, indent=1) + "\n")
    unfinished.replace(out / RESULTS)
    plot(results, out / PICTURE)


if __name__ == "__main__":
    app()
