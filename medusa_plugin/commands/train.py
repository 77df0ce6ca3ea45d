"""`medusa train`: heads for any chat model, by default from text that the model makes itself."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from medusa_plugin.commands.prompts import PromptsError
from medusa_plugin.commands.train_text import TextSource, texts_of
from medusa_plugin.vllm_glue.offline_engine import EngineProcessError

if TYPE_CHECKING:
    from medusa_plugin.training.evaluate import HeldOut
    from medusa_plugin.training.fit import FitState
    from medusa_plugin.training.pipeline import HiddenStates, Plan


class Kind(StrEnum):
    """Of heads."""

    MEDUSA = "medusa"
    CONDITIONED = "conditioned"
    RECURRENT = "recurrent"


class Dtype(StrEnum):
    """Element types."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def train(
    model: Annotated[str, typer.Argument(help="Directory or name of the model.")],
    out: Annotated[
        Path, typer.Option(help="Directory for the heads and the report.", file_okay=False)
    ],
    kind: Annotated[Kind, typer.Option(help="Kind of heads.")] = Kind.RECURRENT,
    num_heads: Annotated[int, typer.Option(min=1, max=64, help="Tokens to look ahead.")] = 4,
    width: Annotated[int, typer.Option(min=1, help="Of the hidden layer; not for medusa.")] = 1152,
    output_rank: Annotated[
        int,
        typer.Option(min=0, help="Width of the output table; 0: share the model's lm head."),
    ] = 256,
    draft_vocab_size: Annotated[
        int, typer.Option(min=2, help="Tokens that heads propose: the most frequent ones.")
    ] = 4096,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts for the model to answer: one a line, or JSON lines with `turns`, of "
            "which the first counts. Default: the model makes up its own.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    conversations: Annotated[
        Path | None,
        typer.Option(
            help="Conversations to learn as they are: JSON lines with `messages`. Every turn of "
            "the assistant counts.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Answer tokens that the model makes, at least.")
    ] = 2_000_000,
    max_answer_tokens: Annotated[int, typer.Option(min=8, help="Longest answer.")] = 1024,
    temperature: Annotated[
        float, typer.Option(min=0, help="Of the model's answers; 0 is greedy.")
    ] = 0.0,
    epochs: Annotated[int, typer.Option(min=1, help="Times that all text is learnt.")] = 4,
    budget_minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="Most time for training proper, after text and states."),
    ] = None,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="Positions of a step.")] = 1024,
    decay: Annotated[
        float, typer.Option(min=0.01, max=1, help="Weight of a head's loss against the one before.")
    ] = 0.9,
    distill: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the loss from the model's own probabilities."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of text, weights and order.")] = 0,
    dtype: Annotated[
        Dtype, typer.Option(help="To compute in; auto: bfloat16 where the machine is made for it.")
    ] = Dtype.AUTO,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Train heads for a chat model. No data set is needed: the model talks to itself.

    A run that was killed goes on where it was when the same command is given again.
    What it needs for that lies in OUT/work, which can be deleted afterwards.

    Examples:

        medusa train "$(medusa path)" --out my_heads

        medusa train MODEL --out my_heads --tokens 500000 --budget-minutes 30

        medusa train MODEL --out my_heads --prompts my_prompts.txt

        medusa train MODEL --out my_heads --conversations chats.jsonl --kind conditioned

        torchrun --nproc-per-node 2 -m medusa_plugin.commands.main train MODEL --out my_heads
    """
    console = Console(quiet=bool(int(os.environ.get("RANK", "0"))))
    if prompts is not None and conversations is not None:
        raise typer.BadParameter("give --prompts or --conversations, not both")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot make the directory {out}: {error}", param_hint="--out"
        ) from None
    from medusa_plugin.heads import HeadsError
    from medusa_plugin.training.fit import FitOptions
    from medusa_plugin.training.pipeline import Plan
    from medusa_plugin.training.setup import Shape
    from medusa_plugin.training.texts import TrainingError

    bf16, chosen = _bf16(dtype, device), _device(device)
    source = TextSource(prompts, conversations, tokens, max_answer_tokens, temperature)
    budget = None if budget_minutes is None else 60 * budget_minutes
    plan = Plan(
        model,
        out,
        Shape(kind.value, num_heads, width, output_rank, draft_vocab_size),
        FitOptions(epochs=epochs, learning_rate=lr, bf16=bf16, budget_seconds=budget, seed=seed),
        batch_size,
        decay,
        distill,
        _torch().bfloat16 if bf16 else _torch().float32,
        chosen,
    )
    try:
        with _processes():
            _run(console, plan, source)
    except (PromptsError, EngineProcessError, HeadsError, TrainingError) as error:
        console.print(f"[red]medusa train:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None


def _run(console: Console, plan: Plan, source: TextSource) -> None:
    """All stages."""
    from medusa_plugin.commands.train_report import write_report
    from medusa_plugin.training.pipeline import evaluate_heads, make_hidden_states, train_heads

    first = not int(os.environ.get("RANK", "0"))
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with progress:
        texts = texts_of(progress, plan, source)
        bar = progress.add_task("Hidden states", total=None)
        data: HiddenStates = make_hidden_states(
            plan,
            texts,
            lambda done, total: progress.update(bar, completed=done, total=total),
            lambda size: console.print(f"Hidden states take {size / 1e9:.2f} GB in {plan.work}"),
        )
        bar = progress.add_task("Training", total=1.0)

        def report(state: FitState, done: float, loss: float) -> None:
            rate = state.examples / max(state.seconds, 1e-9)
            shown = f"Training: step {state.step}, loss {loss:.3f}, {rate:.0f} positions/s"
            progress.update(bar, completed=done, description=shown)

        state = train_heads(plan, data, report)
        progress.update(bar, completed=1.0)
        if not first:
            return
        bar = progress.add_task("Evaluation on held-out text", total=None)
        judged: HeldOut = evaluate_heads(plan, data)
        progress.update(bar, completed=1, total=1)
    command = shlex.join(["medusa", *sys.argv[1:]])
    for file in write_report(plan, command, source.describe(), data, state, judged):
        console.print(f"Written: {file}", highlight=False, soft_wrap=True)
    console.print(
        f"Tokens per step on held-out text: {judged.yields.simulated[15]:.2f} with 16 rows, "
        f"{judged.yields.simulated[31]:.2f} with 32. Serve: vllm serve {plan.model} "
        f"--speculative-model medusa --medusa-heads {plan.out}",
        highlight=False,
        soft_wrap=True,
    )


@contextmanager
def _processes() -> Iterator[None]:
    """The group of processes that torchrun started; nothing for one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    from datetime import timedelta

    import torch.distributed as dist

    # One may have to wait for the text, or the hidden states, of another.
    dist.init_process_group(
        "nccl" if _torch().cuda.is_available() else "gloo", timeout=timedelta(days=7)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _torch() -> Any:
    import torch

    return torch


def _device(name: str) -> Any:
    torch = _torch()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device here", param_hint="--device")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise typer.BadParameter(f"no device {name!r}", param_hint="--device") from None
    return device


def _bf16(dtype: Dtype, device: str) -> bool:
    if dtype is not Dtype.AUTO:
        return dtype is Dtype.BFLOAT16
    torch = _torch()
    fast: Callable[[], bool] = torch.cpu._is_avx512_bf16_supported
    return (device != "cpu" and torch.cuda.is_available()) or fast()
