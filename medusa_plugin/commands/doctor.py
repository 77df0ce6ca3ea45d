"""`medusa doctor`: find out whether something is wrong."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medusa_plugin.atomic_file import write_whole
from medusa_plugin.commands.demo import QUESTIONS, Mode
from medusa_plugin.commands.prompts import PromptsError, read_prompts
from medusa_plugin.divergence import (
    Parting,
    RecordedRun,
    Report,
    RunFileError,
    read_run,
    write_run,
)
from medusa_plugin.divergence import compare as compare_runs
from medusa_plugin.vllm_glue.offline_engine import (
    EngineProcessError,
    EngineSettings,
    OfflineEngine,
    quiet_environment,
)

doctor = typer.Typer(
    name="doctor", help="Find out whether something is wrong.", no_args_is_help=True
)

FAULT, BAD_INPUT = 1, 2


@doctor.callback()
def _options() -> None:
    """Find out whether something is wrong."""


@doctor.command()
def compare(
    a: Annotated[
        Path | None, typer.Argument(metavar="A.json", help="A recorded run, e.g. plain.")
    ] = None,
    b: Annotated[
        Path | None, typer.Argument(metavar="B.json", help="The other, e.g. with Medusa.")
    ] = None,
    live: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Record both now, plain and with Medusa, in place of files."
        ),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(help="With --live: directory of the heads. Default: beside the model."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="With --live: prompts to ask instead: one a line, or JSON lines with `turns`, of "
            "which the first counts."
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="With --live: longest answer, in tokens.")
    ] = 64,
    dtype: Annotated[
        str, typer.Option(help="With --live: element type; auto is the model's own.")
    ] = "auto",
    mode: Annotated[Mode, typer.Option(help="With --live: how vLLM runs the model.")] = Mode.EAGER,
    record: Annotated[
        Path | None,
        typer.Option(
            help="With --live: also write plain.json and medusa.json into this directory."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the report to this file as JSON.")
    ] = None,
) -> None:
    """Show where two greedy runs first differ, and whether rounding explains it.

    At the first differing token both sides tell how much more likely they find
    their own token than the other's, as a gap of logits. Where both gaps are
    within the rounding of the dtype, the runs tie there and each is right;
    anything else is a fault, and worth a report.

    Exit code: 0 where all is equal or tied, 1 at a fault, 2 for files that
    cannot be compared.

    Examples:

        medusa doctor compare plain.json medusa.json

        medusa doctor compare --live MODEL --heads HEADS_DIR

        medusa doctor compare --live "$(medusa path)" --dtype bfloat16 --prompts mine.txt
    """
    console = Console()
    try:
        if live is not None:
            if a is not None:
                raise RunFileError("give two files or --live MODEL, not both")
            runs = _record(console, live, heads, prompts, max_tokens, dtype, mode)
            if record is not None:
                write_run(runs[0], record / "plain.json")
                write_run(runs[1], record / "medusa.json")
        elif a is None or b is None:
            raise RunFileError("give two files, or --live MODEL")
        else:
            runs = read_run(a), read_run(b)
        report = compare_runs(*runs)
        if json_file is not None:
            _write_json(report, json_file)
    except (RunFileError, PromptsError, EngineProcessError) as error:
        # A file's name may have bytes that are no text.
        said = str(error).encode(errors="backslashreplace").decode()
        console.print(f"[red]medusa doctor compare:[/] {escape(said)}", highlight=False)
        raise typer.Exit(BAD_INPUT) from None
    console.print(table(report))
    if report.faults:
        raise typer.Exit(FAULT)


def _record(
    console: Console,
    model: str,
    heads: Path | None,
    prompts: Path | None,
    max_tokens: int,
    dtype: str,
    mode: Mode,
) -> tuple[RecordedRun, RecordedRun]:
    """Run the model plain, then with Medusa: one after the other, since memory may be short."""
    from medusa_plugin.vllm_glue.generations import GenerateRequest, record_run

    asked = read_prompts(prompts) if prompts is not None else QUESTIONS
    first_turns = tuple(turns[0] for turns in asked)
    runs = []
    for source in ("plain", "medusa"):
        options: dict[str, Any] = {
            "model": model,
            "dtype": dtype,
            "enforce_eager": mode is Mode.EAGER,
            "seed": 0,
        }
        if source == "medusa":
            # Whatever trees cost here: what is not drafted cannot be at fault.
            options["speculative_config"] = {"method": "medusa", "sizes": "fixed"}
            if heads is not None:
                options["speculative_config"]["model"] = str(heads)
        with (
            console.status(f"Asking the model, {source}"),
            OfflineEngine(EngineSettings(options, quiet_environment())) as engine,
        ):
            engine.wait_until_ready()
            request = GenerateRequest(f"{source}, {model}", first_turns, max_tokens)
            runs.append(engine.run(record_run, request))
    return runs[0], runs[1]


def _write_json(report: Report, file: Path) -> None:
    result = asdict(report) | {"faults": report.faults}
    try:
        write_whole(file, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise RunFileError(f"{file} cannot be written: {error}") from None


def table(report: Report) -> Table:
    """The report for the terminal."""
    shown = Table(title="First differing token of each prompt")
    for column in ("prompt", "position", "token A", "token B", "gap A", "gap B"):
        shown.add_column(column, justify="right")
    shown.add_column("verdict")
    equal = 0
    for i, parting in enumerate(report.partings):
        if parting is None:
            equal += 1
        else:
            shown.add_row(str(i), *_cells(parting))
    ties = len(report.partings) - equal - report.faults
    shown.caption = escape(
        f"A: {report.sources[0]}; B: {report.sources[1]}. {equal} equal, {ties} tied, "
        f"{report.faults} at fault; gaps of up to {report.rounding:.2g} are rounding"
    )
    return shown


def _cells(parting: Parting) -> list[str]:
    colour = "green" if parting.verdict == "tie" else "red"
    prefix = "" if parting.verdict == "tie" else "fault: "
    return [
        str(parting.position),
        *("ended" if token is None else str(token) for token in parting.tokens),
        *("unknown" if gap is None else f"{gap:.4g}" for gap in parting.gaps),
        f"[{colour}]{prefix}{escape(parting.reason)}[/]",
    ]
