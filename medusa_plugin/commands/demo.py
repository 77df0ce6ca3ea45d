"""`medusa demo`: the embedded model, plain and with Medusa trees, side by side."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from medusa_plugin import __version__
from medusa_plugin.commands.prompts import Conversation, PromptsError, read_prompts
from medusa_plugin.embedded import (
    EmbeddedModelError,
    embedded_heads_path,
    ensure_embedded_model,
)
from medusa_plugin.vllm_glue.offline_engine import (
    Completion,
    EngineProcessError,
    EngineSettings,
    Message,
    OfflineEngine,
    quiet_environment,
)

QUESTIONS: tuple[Conversation, ...] = (
    ("What is the difference between weather and climate?",),
    ("Write a short story about a lighthouse keeper who finds a message in a bottle.",),
    ("Explain in a few sentences how a bicycle stays upright.",),
    ("How do plants make their own food?",),
)
IDENTITY_TOKENS = 64  # float32 answers compared per turn; longer ones only cost time


class Mode(StrEnum):
    """How vLLM runs the target: its default, compiled, or eager."""

    COMPILED = "compiled"
    EAGER = "eager"


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line, apart from the prompts."""

    max_tokens: int
    repetitions: int
    mode: Mode
    dtype: str
    num_speculative_tokens: int | None


@dataclass(frozen=True)
class Turn:
    """One turn answered by both engines."""

    question: str
    plain: list[Completion]
    medusa: list[Completion]


def demo(
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts to ask instead: one a line, or JSON lines with `turns` (all user turns "
            "are asked, each side seeing the same conversation).",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Also write the result to this file as JSON.",
            dir_okay=False,
            writable=True,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 128,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Times each question is asked; the medians count.")
    ] = 3,
    mode: Annotated[Mode, typer.Option(help="How vLLM runs the model, both sides.")] = (
        Mode.COMPILED
    ),
    dtype: Annotated[str, typer.Option(help="Element type of the timed part.")] = "bfloat16",
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=63, help="Nodes of the tree without its root; by default what pays here."
        ),
    ] = None,
) -> None:
    """Ask the embedded model real questions, plain and with Medusa trees, and compare.

    The timed part alternates between the two engines, which have the same
    settings; the speed is tokens per second from submission to the last token,
    at batch 1. A second, float32 part checks that both give the same tokens.

    Examples:

        medusa demo

        medusa demo --mode eager --json result.json

        medusa demo --prompts my_prompts.txt --max-tokens 256
    """
    console = Console()
    options = Options(max_tokens, repetitions, mode, dtype, num_speculative_tokens)
    if json_file is not None:  # now, not after minutes of work
        try:
            json_file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(
                f"cannot make the directory {json_file.parent}: {error}", param_hint="--json"
            ) from None
    try:
        conversations = read_prompts(prompts) if prompts else QUESTIONS
        model = ensure_embedded_model()
        turns = _timed_part(console, conversations, model, options)
        identical = _identity_part(console, conversations, model, options)
    except (PromptsError, EmbeddedModelError, EngineProcessError) as error:
        console.print(f"[red]medusa demo:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    result = summarise(turns, identical)
    result |= _circumstances(options)
    console.print(table(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"Written to {json_file}", highlight=False)
    if not identical:
        raise typer.Exit(2)


def _settings(model: Path, options: Options, medusa: bool) -> EngineSettings:
    """Settings of both sides differ in `speculative_config` alone."""
    engine: dict[str, Any] = {
        "model": str(model),
        "dtype": options.dtype,
        "enforce_eager": options.mode is Mode.EAGER,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,  # a repeated question must cost what it cost first
        "seed": 0,
    }
    if medusa:
        engine["speculative_config"] = {"method": "medusa", "model": str(embedded_heads_path())}
        if options.num_speculative_tokens is not None:
            engine["speculative_config"]["num_speculative_tokens"] = options.num_speculative_tokens
    return EngineSettings(engine, quiet_environment() | {"HF_HUB_OFFLINE": "1"})


def _timed_part(
    console: Console, conversations: Sequence[Conversation], model: Path, options: Options
) -> list[Turn]:
    with ExitStack() as stack:
        plain, medusa = _start_both(console, stack, model, options)
        turns = []
        for conversation in conversations:
            messages: list[Message] = []
            for question in conversation:
                messages.append({"role": "user", "content": question})
                turns.append(_ask_both(console, plain, medusa, messages, options))
                messages.append({"role": "assistant", "content": turns[-1].plain[0].text})
        return turns


def _ask_both(
    console: Console,
    plain: OfflineEngine,
    medusa: OfflineEngine,
    messages: list[Message],
    options: Options,
) -> Turn:
    question = messages[-1]["content"]
    console.rule(f"[bold]{escape(question[:100])}", align="left")
    turn = Turn(question, [], [])
    for repetition in range(options.repetitions):
        for name, style, engine, answers in (
            ("plain ", "cyan", plain, turn.plain),
            ("medusa", "green", medusa, turn.medusa),
        ):
            if repetition == 0:  # shown once; the others only time
                console.print(f"[{style}]{name}[/] ", end="")
                answer = engine.ask(
                    messages, options.max_tokens, lambda text: _stream(console, text)
                )
                rate = len(answer.token_ids) / answer.seconds
                console.print(f"\n[dim]{rate:.1f} tokens/s, {answer.tokens_per_step:.2f} per step")
            else:
                answer = engine.ask(messages, options.max_tokens)
            answers.append(answer)
    if options.dtype != "float32" and turn.plain[0].token_ids != turn.medusa[0].token_ids:
        console.print(
            f"[dim]The texts part where rounding in {options.dtype} decides between two tokens; "
            "float32 is compared at the end."
        )
    return turn


def _stream(console: Console, text: str) -> None:
    console.print(text, end="", markup=False, highlight=False, soft_wrap=True)


def _identity_part(
    console: Console, conversations: Sequence[Conversation], model: Path, options: Options
) -> bool:
    """Whether greedy float32 answers of both engines are the same tokens."""
    exact = replace(options, dtype="float32", mode=Mode.EAGER)
    with ExitStack() as stack:
        plain, medusa = _start_both(console, stack, model, exact)
        identical = True
        for conversation in conversations:
            messages: list[Message] = []
            for question in conversation:
                messages.append({"role": "user", "content": question})
                ours = medusa.ask(messages, IDENTITY_TOKENS)
                theirs = plain.ask(messages, IDENTITY_TOKENS)
                identical &= ours.token_ids == theirs.token_ids
                messages.append({"role": "assistant", "content": theirs.text})
        return identical


def _start_both(
    console: Console, stack: ExitStack, model: Path, options: Options
) -> tuple[OfflineEngine, OfflineEngine]:
    """Start the plain and the Medusa engine together: each compiles on about one core."""
    engines, tasks = [], []
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    ) as progress:
        for name in ("plain", "medusa"):
            description = f"Starting vLLM, {name} ({options.dtype}, {options.mode})"
            tasks.append(progress.add_task(description, total=1))
            settings = _settings(model, options, medusa=name == "medusa")
            engines.append(stack.enter_context(OfflineEngine(settings)))
        for engine, task in zip(engines, tasks, strict=True):
            engine.wait_until_ready()
            progress.advance(task)
    return engines[0], engines[1]


def summarise(turns: Sequence[Turn], identical: bool) -> dict[str, Any]:
    """Medians over repetitions of whole passes through all turns."""
    plain = _rate([turn.plain for turn in turns])
    medusa = _rate([turn.medusa for turn in turns])
    answers = [turn.medusa[0] for turn in turns]
    decode_steps = sum(answer.steps - 1 for answer in answers)
    return {
        "plain_tokens_per_second": round(plain, 2),
        "medusa_tokens_per_second": round(medusa, 2),
        "speedup": round(medusa / plain, 3),
        "tokens_per_step": round(
            sum(len(answer.token_ids) - 1 for answer in answers) / max(decode_steps, 1), 3
        ),
        "nodes_verified": sum(answer.nodes_verified for answer in answers),
        "identical_float32": identical,
        "turns": [
            {
                "question": turn.question,
                "plain": [_numbers(answer) for answer in turn.plain],
                "medusa": [_numbers(answer) for answer in turn.medusa],
            }
            for turn in turns
        ],
    }


def _rate(answers: Sequence[Sequence[Completion]]) -> float:
    """Tokens per second of each repetition over all turns; their median."""
    rates = [
        sum(len(answer.token_ids) for answer in repetition)
        / sum(answer.seconds for answer in repetition)
        for repetition in zip(*answers, strict=True)
    ]
    return float(statistics.median(rates))


def _numbers(answer: Completion) -> dict[str, Any]:
    numbers = asdict(answer)
    numbers["tokens"] = len(numbers.pop("token_ids"))
    del numbers["text"]
    return numbers


def _circumstances(options: Options) -> dict[str, Any]:
    return {
        **asdict(options),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git_sha": _git_sha(),
        "versions": {
            "medusa": __version__,
            **{name: metadata.version(name) for name in ("vllm", "torch", "apache-tvm")},
        },
        "hardware": {"cpu": _cpu_model(), "cores": os.cpu_count()},
    }


def _git_sha() -> str | None:
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def table(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal."""
    shown = Table(title="plain vLLM against Medusa trees, batch 1", show_header=False)
    shown.add_column(style="bold")
    shown.add_column(justify="right")
    shown.add_row("plain, tokens/s", f"{result['plain_tokens_per_second']:.1f}")
    shown.add_row("medusa, tokens/s", f"{result['medusa_tokens_per_second']:.1f}")
    shown.add_row("speed-up", f"{result['speedup']:.2f} x")
    shown.add_row("tokens per step", f"{result['tokens_per_step']:.2f}")
    shown.add_row("nodes verified", str(result["nodes_verified"]))
    shown.add_row(
        "identical output in float32",
        "[green]yes[/]" if result["identical_float32"] else "[red]no[/]",
    )
    shown.caption = f"{result['dtype']}, {result['mode']}, {result['hardware']['cpu']}, " + (
        f"{result['hardware']['cores']} cores"
    )
    return shown
