"""Time tree_attention and compact_kv beside vLLM's kernel, torch's SDPA, TVM's and memcpy.

Pairs run in turn and medians are compared; numbers appear only after every kernel was checked.
See docs/performance.md for how to read them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import typer
from ops.report import SECTION, markdown
from ops.results import ParityError, summarise
from record.markdown import replace_section
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from ops.machine import Limits, Machine
    from ops.timing import Record, Repeats

EXAMPLES = """Examples:

\b
python benchmarks/bench_ops.py --quick             # an eighth of the shapes, a few minutes
python benchmarks/bench_ops.py                     # everything, on a machine left alone
python benchmarks/bench_ops.py --threads 1 --only compaction --step-ms 33
python benchmarks/bench_ops.py --markdown build/bench_ops/results.json
python benchmarks/bench_ops.py --markdown build/bench_ops/results.json --into docs/performance.md
"""
console = Console(stderr=True)
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=__doc__, epilog=EXAMPLES)
def main(
    quick: Annotated[bool, typer.Option("--quick", help="An eighth of the shapes.")] = False,
    threads: Annotated[str, typer.Option(help="Numbers of threads, comma-separated.")] = "1,2",
    out: Annotated[Path, typer.Option(help="Directory for results.json and plots.")] = Path(
        "build/bench_ops"
    ),
    only: Annotated[str, typer.Option(help="attention or compaction; default both.")] = "",
    seconds: Annotated[float, typer.Option(help="Time for each pair, if 7 rounds fit.")] = 0.6,
    step_ms: Annotated[
        float,
        typer.Option(help="Decode step that compaction is a share of; 19: README, compiled plain."),
    ] = 19.0,
    markdown_file: Annotated[
        Path | None,
        typer.Option("--markdown", help="Measure nothing: print this results.json as tables."),
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="With --markdown: replace the tables in this file.")
    ] = None,
) -> None:
    if markdown_file is not None:
        text = markdown(json.loads(markdown_file.read_text()))
        if into is None:
            print(text)
        else:
            into.write_text(replace_section(into.read_text(), SECTION, text))
        return
    counts = thread_counts(threads)
    if only not in ("", "attention", "compaction"):
        raise typer.BadParameter(f"--only {only}: expected attention or compaction")
    try:
        results = measure(counts, quick, only, seconds, step_ms)
    except ParityError as error:
        console.print(f"No numbers: {error}", style="bold red", markup=False)
        raise typer.Exit(1) from error
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    from ops.plot import plot

    files = [out / "results.json", *plot(results["attention"], out)]
    print(json.dumps(results["summary"], indent=1))
    console.print("written:", *map(str, files))


def thread_counts(text: str) -> list[int]:
    """Numbers of threads, each at most the processors this process may use."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--threads {text}: expected numbers like 1,2") from error
    available = len(os.sched_getaffinity(0))
    if not all(1 <= count <= available for count in counts):
        raise typer.BadParameter(
            f"--threads {text}: this process may use {available} processors; more threads than "
            "that would measure the scheduler"
        )
    return counts


def measure(
    threads: list[int], quick: bool, only: str, seconds: float, step_ms: float
) -> dict[str, Any]:
    """All that results.json holds. Raises ParityError if any kernel is wrong."""
    from ops.machine import Machine, measure_limits
    from ops.shapes import NOTES
    from ops.timing import Repeats
    from record.circumstances import circumstances

    from tvm_ops.targets import cpu_flags

    facts = circumstances()  # before the run: the tree may change under it
    repeats = Repeats(seconds)
    amx_missing = None if "amx_bf16" in cpu_flags() else "this processor has no amx_bf16"
    attention: list[Record] = []
    compaction: list[Record] = []
    with tempfile.TemporaryDirectory() as directory:
        machine = Machine(Path(directory))
        limits = [measure_limits(machine, count) for count in threads]
        if only != "compaction":
            attention = list(_attention(limits, quick, repeats, amx_missing))
        if only != "attention":
            compaction = list(_compaction(machine, threads, quick, step_ms, repeats))
    return {
        **facts,
        "quick": quick,
        "threads": threads,
        "notes": NOTES,
        "summary": summarise(attention, compaction, amx_missing, step_ms),
        "limits": [limit.as_record() for limit in limits],
        "attention": attention,
        "compaction": compaction,
    }


def _attention(
    limits: list[Limits], quick: bool, repeats: Repeats, amx_missing: str | None
) -> Iterator[Record]:
    from ops.attention import KINDS, measure_attention
    from ops.rivals import TvmTreeAttention
    from ops.shapes import attention_shapes, every
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    shapes = every(8, attention_shapes()) if quick else attention_shapes()
    kinds = [kind for kind in KINDS if kind[0] != "amx" or amx_missing is None]
    tvm_baseline = TvmTreeAttention(shapes)
    cases = [(shape, *kind) for kind in kinds for shape in shapes]
    for shape, isa, dtype in _progress("attention", cases):
        yield from measure_attention(shape, isa, dtype, limits, tvm_baseline, repeats)


def _compaction(
    machine: Machine, threads: list[int], quick: bool, step_ms: float, repeats: Repeats
) -> Iterator[Record]:
    from ops.compaction import measure_compaction
    from ops.shapes import compaction_shapes, every

    shapes = every(4, compaction_shapes()) if quick else compaction_shapes()
    for shape in _progress("compaction", shapes):
        yield from measure_compaction(shape, threads, machine, step_ms, repeats)


def _progress(what: str, items: list[Any]) -> Iterable[Any]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    # Drawn twice a second: the bar's own thread should cost nothing.
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        yield from progress.track(items, description=what)


if __name__ == "__main__":
    app()
