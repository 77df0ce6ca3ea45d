"""`medusa convert`: write heads in the format of another project."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from medusa_plugin.commands.quiet_log import errors_only


class Format(enum.StrEnum):
    """Formats to convert to."""

    MEDUSA_V1 = "medusa-v1"
    MEDUSA_V2 = "medusa-v2"
    VLLM = "vllm"
    TENSORRT_LLM = "tensorrt-llm"
    MLC = "mlc"


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Directory or hub id of plain Medusa heads.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Directory to write to.")],
    to: Annotated[Format, typer.Option("--to", help="Format to write.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Overwrite files in DST.")] = False,
) -> None:
    """Write heads in the format of another project; the weights stay the same bit for bit.

    medusa convert HEADS_DIR OUT --to vllm

    medusa convert FasterDecoding/medusa-vicuna-7b-v1.3 OUT --to tensorrt-llm

    What a format cannot express is refused, with the reason.
    """
    from medusa_plugin.heads import HeadsError
    from medusa_plugin.heads.convert import plan_conversion

    console = Console()
    try:
        with (
            errors_only(),  # 'medusa inspect' tells of the warnings
            Progress(
                TextColumn("writing"),
                BarColumn(),
                DownloadColumn(),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            ) as progress,
        ):
            conversion = plan_conversion(source, destination, to.value, force=force)
            task = progress.add_task("", total=conversion.num_bytes)
            conversion.write(lambda done: progress.advance(task, done))
    except HeadsError as error:
        console.print(f"[red]medusa convert:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    console.print(
        escape(f"{conversion.variant.describe()}: {conversion.num_bytes:,} bytes in {destination}"),
        highlight=False,
    )
    for note in conversion.notes:
        console.print(escape(f"Note: {note}."), highlight=False)
