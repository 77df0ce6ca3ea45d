"""Random requests through Medusa and through plain vLLM; every answer is compared.

Ends with exit code 1 if anything differs beyond rounding, or is not given back.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
console = Console(stderr=True)
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests to compare.")] = 10_000,
    seed: Annotated[int | None, typer.Option(help="Of the first round; default 0.")] = None,
    minutes: Annotated[float, typer.Option(help="End after so many, whatever is done.")] = 240.0,
    out: Annotated[Path, typer.Option(help="Report.")] = Path("build/soak.json"),
    resume: Annotated[bool, typer.Option(help="Go on where the report ends.")] = False,
    configuration: Annotated[str | None, typer.Option(help="Use this engine only.")] = None,
    shrunk: Annotated[
        bool, typer.Option("--shrink", help="Make the round of this seed as small as still fails.")
    ] = False,
    faults: Annotated[
        str | None, typer.Option(help="Plant this fault instead, or 'all', one after the other.")
    ] = None,
) -> None:
    from tests.soak import trial
    from tests.soak.engines import laboratory
    from tests.soak.report import Report
    from tests.soak.rounds import configuration_of, make_plan, run_round
    from tests.soak.shrink import describe, shrink

    if faults:
        with laboratory() as made:
            missed = trial.try_faults(made, console, faults)
        raise typer.Exit(1 if missed else 0)
    if shrunk:
        with laboratory() as made:
            chosen = configuration or configuration_of(seed or 0)
            plan = shrink(made, make_plan(made.plain, seed or 0, chosen), console)
        for line in describe(plan):
            console.print(line, markup=False, highlight=False)
        return
    report = Report(out, resume)
    if seed is None:
        seed = report.next_seed or 0
    deadline = time.monotonic() + 60 * minutes
    with laboratory() as made, _progress() as progress:
        task = progress.add_task("", total=requests, completed=report.values["compared"])
        started = set()
        while report.values["compared"] < requests and time.monotonic() < deadline:
            result = run_round(made, seed, configuration)
            if result.configuration not in started:
                started.add(result.configuration)
                report.forget_memory()
            report.add(result)
            for finding in result.findings:
                kind = "tie" if finding.is_tie else "MISMATCH"
                console.print(f"{kind}: {finding}", markup=False, highlight=False)
            for name, number in result.leftovers.items():
                if number:
                    console.print(f"LEFT OVER: seed {seed}: {number} {name}", markup=False)
            values = report.values
            progress.update(
                task,
                completed=values["compared"],
                description=f"seed {seed} ({result.configuration}), {values['mismatches']} "
                f"mismatches, {values['ties']} ties",
            )
            seed += 1
    report.write()
    console.print(f"{report.values['compared']} requests compared, report in {out}")
    if report.faults:
        console.print("FAILED: " + "; ".join(report.faults))
        raise typer.Exit(1)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


if __name__ == "__main__":
    app()
