"""`medusa tune`: measure heads on the model's own text, and write what was learnt beside them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from medusa_plugin import __version__
from medusa_plugin.commands.demo import Mode
from medusa_plugin.commands.prompts import PromptsError, read_numbered_prompts
from medusa_plugin.vllm_glue.offline_engine import (
    EngineProcessError,
    EngineSettings,
    OfflineEngine,
    quiet_environment,
)

if TYPE_CHECKING:
    from medusa_plugin.heads.tuning import HeadsTuning
    from medusa_plugin.training.calibrate import HeadFit
    from medusa_plugin.training.record import Answer
    from medusa_plugin.training.tree_sizes import Yield
    from medusa_plugin.vllm_glue.recording import EngineFacts, Recording

BATCHES = (1, 2, 4, 8, 16, 32)
RANKS = 32
"""Candidates of a head whose accuracy is measured: static trees use no more."""


class TuneError(RuntimeError):
    """The heads cannot be tuned; the message says why and what to do."""


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line, apart from the files."""

    model: str
    heads: Path | None
    num_prompts: int
    max_tokens: int
    mode: Mode
    dtype: str
    num_speculative_tokens: int | None
    draft_vocab_size: int | str


@dataclass(frozen=True)
class Measured:
    """What the engine told."""

    facts: EngineFacts
    recording: Recording
    fits: list[HeadFit]
    yields: Yield
    """Of the held-out answers."""


def tune(
    model: Annotated[str, typer.Argument(help="Directory or name of the model.")],
    heads: Annotated[
        Path | None,
        typer.Option(help="Directory of the heads. Default: the heads beside the model."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts to answer: one a line, or JSON lines with `turns`, of which the first "
            "counts. Take what the heads were not trained on. Default: the model makes up its own.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for tuning.json and tuning.png. Default: beside the heads, or the "
            "cache where that is read-only; an engine looks in both.",
            file_okay=False,
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=2, help="At most that many prompts.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest answer, in tokens.")] = 128,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Also write all figures to this file.", dir_okay=False),
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="How vLLM runs the model; the step costs shown depend on it.")
    ] = Mode.COMPILED,
    dtype: Annotated[str, typer.Option(help="Element type; auto is the model's own.")] = "auto",
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=63, help="Most nodes of a tree. Default: as when serving."),
    ] = None,
    draft_vocab_size: Annotated[
        str, typer.Option(metavar="N|auto|full", help="Tokens that the heads may propose.")
    ] = "auto",
) -> None:
    """Measure how far the heads' probabilities can be trusted, and which tree sizes pay here.

    The model answers prompts greedily while the heads' candidates are compared
    with what comes. From that: a calibration for dynamic trees, accuracies for
    static ones, both in tuning.json, which engines read at their next start;
    and a table of expected and simulated speed by size.

    Examples:

        medusa tune "$(medusa path)"

        medusa tune MODEL --heads HEADS_DIR --prompts my_prompts.txt

        medusa tune MODEL --num-prompts 400 --out results --json results/figures.json
    """
    console = Console()
    options = Options(
        model,
        heads,
        num_prompts,
        max_tokens,
        mode,
        dtype,
        num_speculative_tokens,
        _vocab_size(draft_vocab_size),
    )
    for directory, hint in ((out, "--out"), (json_file and json_file.parent, "--json")):
        if directory is not None:  # now, not after minutes of work
            _make_directory(directory, hint)
    from medusa_plugin.heads import HeadsError

    try:
        asked = _first_turns(prompts, num_prompts) if prompts else None
        measured = _measure(console, options, asked)
        source = f"{prompts.name} (first turns)" if prompts else "made up by the model itself"
        _finish(console, options, measured, source, out, json_file)
    except (PromptsError, EngineProcessError, HeadsError, TuneError) as error:
        console.print(f"[red]medusa tune:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None


def _first_turns(file: Path, most: int) -> dict[str, str]:
    """At most so many first turns of a prompts file, each after its place in the file."""
    numbered = read_numbered_prompts(file)[:most]
    return {f"{file}, line {number}": turns[0] for number, turns in numbered}


def _vocab_size(text: str) -> int | str:
    if text in ("auto", "full"):
        return text
    if text.isdecimal() and int(text):
        return int(text)
    raise typer.BadParameter(
        f"expected a number, auto or full, got {text!r}", param_hint="--draft-vocab-size"
    )


def _make_directory(directory: Path, hint: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot make the directory {directory}: {error}", param_hint=hint
        ) from None


def settings(options: Options) -> EngineSettings:
    """How the engine is started: as for serving, but without an earlier tuning."""
    speculative: dict[str, Any] = {"method": "medusa", "tuning": False}
    speculative["draft_vocab_size"] = options.draft_vocab_size
    if options.heads is not None:
        speculative["model"] = str(options.heads)
    if options.num_speculative_tokens is not None:
        speculative["num_speculative_tokens"] = options.num_speculative_tokens
    engine: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "enforce_eager": options.mode is Mode.EAGER,
        "max_num_seqs": 32,
        "seed": 0,
        "speculative_config": speculative,
    }
    return EngineSettings(engine, quiet_environment())


def _measure(console: Console, options: Options, asked: Mapping[str, str] | None) -> Measured:
    """Start the engine, make prompts up unless there are some, and record their answers.

    Args:
        console: for the progress.
        options: of the command line.
        asked: place -> prompt; None for prompts of the model's own.

    Raises:
        PromptsError: a prompt leaves no room for an answer.
    """
    from medusa_plugin.vllm_glue.recording import (
        RecordRequest,
        facts,
        prompt_lengths,
        record,
        sample_prompts,
        simulate,
    )

    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with progress, OfflineEngine(settings(options)) as engine:
        start = progress.add_task(f"Starting vLLM ({options.dtype}, {options.mode})", total=1)
        engine.wait_until_ready()
        progress.advance(start)
        known: EngineFacts = engine.run(facts, None)
        if asked is None:
            count = options.num_prompts
            advance = _bar(progress, "Making up prompts", count)
            texts: list[str] = engine.run(sample_prompts, count, advance)
            lengths = engine.run(prompt_lengths, texts)
            fits = [length < known.max_model_len for length in lengths]
            texts = list(itertools.compress(texts, fits))
        else:
            texts = list(asked.values())
            _require_room(list(asked), engine.run(prompt_lengths, texts), known.max_model_len)
        request = RecordRequest(tuple(texts), options.max_tokens, max(RANKS, known.num_nodes))
        advance = _bar(progress, "Answering prompts", len(texts))
        recording: Recording = engine.run(record, request, advance)
        fits = fit_answers(recording.answers, known.num_nodes)
        yields: Yield = engine.run(simulate, [fit.calibration for fit in fits])
        return Measured(known, recording, fits, yields)


def _require_room(places: Sequence[str], lengths: Sequence[int], max_model_len: int) -> None:
    """Raise `PromptsError` naming the first prompt that leaves no room for an answer."""
    for place, length in zip(places, lengths, strict=True):
        if length >= max_model_len:
            raise PromptsError(
                f"{place}: the prompt has {length} tokens, but the model's context holds "
                f"{max_model_len}, answer included: shorten it"
            )


def _bar(progress: Progress, description: str, total: int) -> Callable[[int], None]:
    task = progress.add_task(description, total=total)
    return lambda done: progress.update(task, completed=done)


def _finish(
    console: Console,
    options: Options,
    measured: Measured,
    source: str,
    out: Path | None,
    json_file: Path | None,
) -> None:
    """Write the files and show the tables."""
    from medusa_plugin.commands import tune_report
    from medusa_plugin.heads import peek_heads
    from medusa_plugin.heads.tuning import write_tuning
    from medusa_plugin.training.calibrate import split
    from medusa_plugin.training.tree_sizes import rates

    weights = peek_heads(measured.facts.heads, use_tuning=False).path
    tuning = learn(options, measured, source, weights)
    file = write_tuning(tuning, weights, out)

    answers, costs = measured.recording.answers, measured.recording.costs
    fits, yields = measured.fits, measured.yields
    curves = [
        tune_report.Curve(
            batch, rates(yields.expected, costs, batch), rates(yields.simulated, costs, batch)
        )
        for batch in BATCHES
    ]
    console.print(tune_report.fit_table(fits, len(answers), len(split(answers)[1])))
    console.print(tune_report.cost_table(costs))
    console.print(tune_report.size_table(curves, costs))
    console.print(f"Tuning written to {file}", highlight=False, soft_wrap=True)
    console.print(_plot(curves, file.with_suffix(".png")), highlight=False, soft_wrap=True)
    if json_file is not None:
        figures = tune_report.figures(fits, yields, curves, costs)
        figures |= {"options": asdict(options), "tuning": tuning.model_dump()}
        json_file.write_text(json.dumps(figures, indent=1, default=str) + "\n")
        console.print(f"Figures written to {json_file}", highlight=False, soft_wrap=True)


def fit_answers(answers: Sequence[Answer], num_nodes: int) -> list[HeadFit]:
    """Calibrate the heads on most answers, and judge that by the others.

    Raises:
        TuneError: there are fewer than two answers of use.
    """
    from medusa_plugin.training.calibrate import fit_heads, judge, split

    try:
        fit, held_out = split(answers)
    except ValueError as error:
        raise TuneError(
            f"too little to learn from: {error}. Answers that end or loop within 8 tokens do not "
            "count: give more prompts"
        ) from None
    return fit_heads(judge(fit, num_nodes), judge(held_out, num_nodes), num_nodes)


def learn(options: Options, measured: Measured, source: str, weights: Path) -> HeadsTuning:
    """Put what was measured into the form of the file."""
    from medusa_plugin.heads.tuning import MeasuredOn
    from medusa_plugin.training.calibrate import accuracies, judge, tuning_of

    answers = measured.recording.answers
    return tuning_of(
        measured.fits,
        accuracies(judge(answers, measured.facts.num_nodes)),
        weights,
        measured.facts.draft_vocab_size,
        MeasuredOn(
            # Of a local model only the name: the file goes around with the heads.
            model=Path(options.model).name if Path(options.model).is_dir() else options.model,
            prompts=source,
            num_prompts=len(answers),
            num_tokens=sum(len(answer.tokens) for answer in answers),
            dtype=measured.facts.dtype,
            medusa=__version__,
        ),
    )


def _plot(curves: Sequence[Any], path: Path) -> str:
    from medusa_plugin.commands.tune_report import plot

    try:
        plot(curves, path)
    except ImportError:
        return "No plot: it needs matplotlib (pip install 'vllm-medusa[bench]')"
    return f"Plot written to {path}"
