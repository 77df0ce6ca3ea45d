"""Entry point of the `medusa` command."""

from __future__ import annotations

from typing import Annotated

import typer

from medusa_plugin import __version__
from medusa_plugin.commands.convert import convert
from medusa_plugin.commands.demo import demo
from medusa_plugin.commands.doctor import doctor
from medusa_plugin.commands.inspect import inspect
from medusa_plugin.commands.train import train
from medusa_plugin.commands.tune import tune

app = typer.Typer(
    name="medusa",
    help="Serve Medusa heads on vLLM: token trees verified in one pass of the target model.",
    epilog="First: medusa demo. Then: vllm serve $(medusa path) --speculative-model medusa",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"medusa {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of all subcommands."""


@app.command()
def path() -> None:
    """Print the directory of the embedded model, made on first use.

    Example: vllm serve $(medusa path) --speculative-model medusa
    """
    from medusa_plugin.embedded import EmbeddedModelError, ensure_embedded_model

    try:
        typer.echo(ensure_embedded_model())
    except EmbeddedModelError as error:
        typer.echo(f"medusa: {error}", err=True)
        raise typer.Exit(1) from None


app.command()(demo)
app.command()(train)
app.command()(tune)
app.command()(inspect)
app.command()(convert)
app.add_typer(doctor)


if __name__ == "__main__":  # for torchrun
    app()
