"""`medusa inspect`: what heads on disk are, and whether they would load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medusa_plugin.commands.quiet_log import errors_only

if TYPE_CHECKING:
    from medusa_plugin.heads.report import LoadReport


def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Directory or hub id of heads of any kind.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what heads are: format, kind, sizes, vocabulary, warnings. No weight is loaded.

    medusa inspect HEADS_DIR

    medusa inspect FasterDecoding/medusa-vicuna-7b-v1.3 --json
    """
    from medusa_plugin.heads import HeadsError
    from medusa_plugin.heads.report import inspect_heads

    try:
        with errors_only():  # the warnings are in the report
            report = inspect_heads(path)
    except HeadsError as error:
        Console(stderr=True).print(f"[red]medusa inspect:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(report.model_dump_json(indent=1))
    else:
        _print(Console(), report)


def _print(console: Console, report: LoadReport) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(report):
        table.add_row(name, escape(value))
    console.print(table)
    for warning in report.warnings:
        console.print(f"[yellow]Warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)


def _rows(report: LoadReport) -> list[tuple[str, str]]:
    tokens = report.draft_vocab_ranked
    tuned = report.tuned_draft_vocab_size
    files = report.files[0]
    if len(report.files) > 1:
        files += f" and {len(report.files) - 1} more"
    rows = [
        ("heads", report.description),
        ("format", report.format),
        ("files", files),
        ("hidden size", str(report.hidden_size)),
        ("vocabulary", str(report.vocab_size or "the target's")),
        ("language-model head", report.lm_head),
        ("biases", "yes" if report.has_bias else "no"),
        ("weights", f"{report.num_parameters:,} parameters, {', '.join(report.dtypes)}"),
        ("size", f"{report.num_bytes:,} bytes"),
        ("draft vocabulary", f"up to {tokens} tokens ranked" if tokens else "not ranked"),
        ("reads tokens", "yes" if report.reads_tokens else "no"),
        ("accuracies", "known" if report.has_accuracies else "not known"),
        ("tuning", "none" if tuned is None else f"for a draft vocabulary of {tuned}"),
    ]
    if report.base_model:
        rows.append(("base model", report.base_model))
    if report.other_tensors:
        rows.append(("beside them", f"{report.other_tensors} tensors of the target"))
    return rows
