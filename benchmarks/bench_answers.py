"""Time whole answers, one at a time: plain vLLM beside our trees, loops left out and let in.

Every prompt is answered greedily to its natural end, or to --max-tokens. Small models fall into
loops, where any draft is easy: the main figures end each answer where its loop begins. The engines
take turns prompt by prompt. bf16 may part at near ties, since batch shapes round differently: the
share of equal answers is reported, and float32 must agree on everything (see bench_decode.py).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from decode.engines import PLAIN, Contender, Setup, ours, parse_variant
from rich.console import Console
from rich.progress import track
from rich.table import Table

from medusa_plugin.commands.prompts import read_prompts
from medusa_plugin.embedded import embedded_heads_path, ensure_embedded_model
from medusa_plugin.vllm_glue.offline_engine import Completion, OfflineEngine

# Children import this file and read the number of threads with torch, which nothing here imports
# at the top.

EXAMPLES = """Examples:

\b
python benchmarks/bench_answers.py --prompts prompts.jsonl
python benchmarks/bench_answers.py --prompts prompts.jsonl --rows 16,32 --repetitions 1
python benchmarks/bench_answers.py --prompts mine.txt --heads HEADS_DIR --threads 1
"""
console = Console(stderr=True)
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Ask:
    """One answer of one engine."""

    engine: str
    repetition: int
    prompt: int
    loops: bool
    """Whether a loop was let in."""
    tokens: int
    steps: int
    """Engine steps that gave tokens; the first is the prefill."""
    seconds: float
    equal: bool
    """To plain's."""


@app.command(help=__doc__, epilog=EXAMPLES)
def main(
    prompts: Annotated[
        Path,
        typer.Option(
            help="One a line, or JSON lines with `turns`, of which the first is asked.",
            exists=True,
            dir_okay=False,
        ),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Ask only the first so many.")] = None,
    rows: Annotated[
        str, typer.Option(help="Ours also with trees of always so many rows, e.g. 16,32.")
    ] = "",
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Ours with other options, as NAME=JSON; may be repeated."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 256,
    repetitions: Annotated[int, typer.Option(min=1, help="Times all is asked.")] = 3,
    eager: Annotated[bool, typer.Option("--eager", help="Do not compile the model.")] = False,
    dtype: Annotated[str, typer.Option(help="Element type.")] = "bfloat16",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of each engine; by default one per processor.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Default: the embedded model.", file_okay=False)
    ] = None,
    heads: Annotated[
        Path | None, typer.Option(help="Default: the embedded heads.", file_okay=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for results.json.")] = Path(
        "build/bench_answers"
    ),
) -> None:
    from record.circumstances import circumstances

    facts = circumstances()
    heads = heads or embedded_heads_path()
    asked = [turns[0] for turns in read_prompts(prompts)][:limit]
    setup = Setup(
        model=model or ensure_embedded_model(),
        heads=heads,
        eager=eager,
        dtype=dtype,
        threads=threads or len(os.sched_getaffinity(0)),
        max_num_seqs=1,
    )
    takers = [Contender(PLAIN), ours("ours", heads, {})]
    for count in (int(text) for text in rows.split(",") if text):
        fixed = {"num_speculative_tokens": count - 1, "sizes": "fixed"}
        takers.append(ours(f"ours, {count} rows", heads, fixed))
    takers += [parse_variant(text, heads) for text in variant or ()]
    with ExitStack() as stack:
        engines: dict[str, OfflineEngine] = {}
        for taker in takers:  # one after the other: each measures the cost of a step as it starts
            engines[taker.name] = stack.enter_context(OfflineEngine(taker.settings(setup)))
            console.print(f"{taker.name}: ready in {engines[taker.name].wait_until_ready():.0f} s")
        runs = measure(engines, asked, max_tokens, repetitions)
    results = {
        **facts,
        "threads": setup.threads,
        "mode": "eager" if eager else "compiled",
        "dtype": dtype,
        "prompts": prompts.name,
        "num_prompts": len(asked),
        "max_tokens": max_tokens,
        "repetitions": repetitions,
        "engines": {taker.name: taker.options for taker in takers},
        "summary": summary(runs),
        "runs": [asdict(run) for run in runs],
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    show(results["summary"])
    console.print(f"written: {out / 'results.json'}", soft_wrap=True)


def measure(
    engines: dict[str, OfflineEngine], prompts: Sequence[str], max_tokens: int, repetitions: int
) -> list[Ask]:
    """Ask everything of every engine; loops are let in once, at the end."""
    import numpy as np

    from medusa_plugin.training.record import loop_start

    whole = [
        ask(engines[PLAIN], prompt, max_tokens)
        for prompt in track(prompts, "plain, to find loops", console=console)
    ]
    starts = [loop_start(np.array(answer.token_ids)) for answer in whole]
    usable = [i for i, start in enumerate(starts) if start >= 2]
    runs = []
    rounds = [(repetition, False) for repetition in range(repetitions)] + [(0, True)]
    for repetition, loops in rounds:
        name = "loops let in" if loops else f"repetition {repetition + 1}"
        for i in track(usable, name, console=console):
            length = len(whole[i].token_ids) if loops else starts[i]
            expected = whole[i].token_ids[:length]
            for engine in engines:
                answer = ask(engines[engine], prompts[i], length)
                runs.append(
                    Ask(
                        engine,
                        repetition,
                        i,
                        loops,
                        len(answer.token_ids),
                        answer.steps,
                        answer.seconds,
                        answer.token_ids == expected,
                    )
                )
    return runs


def ask(engine: OfflineEngine, prompt: str, max_tokens: int) -> Completion:
    """One answer."""
    return engine.ask([{"role": "user", "content": prompt}], max_tokens)


def summary(runs: Sequence[Ask]) -> dict[str, dict[str, Any]]:
    """By engine: tokens per step, milliseconds per token, and the speed-up over plain.

    The speed-up compares seconds per token of all prompts together, prefill included; it is the
    median over the repetitions.
    """
    found: dict[str, dict[str, Any]] = {}
    for loops in (False, True):
        for engine in dict.fromkeys(run.engine for run in runs):
            kept = [run for run in runs if run.engine == engine and run.loops == loops]
            repetitions = sorted({run.repetition for run in kept})
            speeds = [speed(runs, engine, r, loops) for r in repetitions]
            plain = [speed(runs, PLAIN, r, loops) for r in repetitions]
            ratios = [mine / theirs for mine, theirs in zip(speeds, plain, strict=True)]
            answered = [run for run in kept if run.steps > 1]
            found.setdefault(engine, {})["with loops" if loops else "without loops"] = {
                "tokens_per_step": sum(run.tokens - 1 for run in answered)
                / sum(run.steps - 1 for run in answered),
                "tokens_per_second": statistics.median(speeds),
                "speedup": statistics.median(ratios),
                "speedups": ratios,
                "tokens": sum(run.tokens for run in kept) // len(repetitions),
                "equal_answers": sum(run.equal for run in kept) / len(kept),
            }
    return found


def speed(runs: Sequence[Ask], engine: str, repetition: int, loops: bool) -> float:
    """Tokens per second over all prompts."""
    kept = [r for r in runs if (r.engine, r.repetition, r.loops) == (engine, repetition, loops)]
    return sum(run.tokens for run in kept) / sum(run.seconds for run in kept)


def show(found: dict[str, dict[str, Any]]) -> None:
    """A table for people; results.json has everything."""
    table = Table("engine", "loops", "tokens/step", "tokens/s", "speed-up", "equal answers")
    for engine, kinds in found.items():
        for kind, figures in kinds.items():
            table.add_row(
                engine,
                kind,
                f"{figures['tokens_per_step']:.2f}",
                f"{figures['tokens_per_second']:.1f}",
                f"{figures['speedup']:.2f}",
                f"{figures['equal_answers']:.0%}",
            )
    Console(file=sys.stdout).print(table)


if __name__ == "__main__":
    app()
