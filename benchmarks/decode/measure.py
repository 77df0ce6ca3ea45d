"""Start the engines, compare what they say, then ask all of them the same, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from decode.engines import PLAIN, Contender, Setup
from decode.identity import (
    Answers,
    Question,
    answer_all,
    differences,
    groups,
    judge,
    questions,
)
from decode.results import Run, StageTimes, stage_times
from medusa_plugin.vllm_glue.offline_engine import (
    BatchCompletion,
    EngineProcessError,
    OfflineEngine,
)

WARM_UP_TOKENS = 8
ROUNDS = 2  # requests per request in flight, so that some begin while others go on
STAGE_GROUPS = 4  # groups of prompts whose steps are timed stage by stage
SPARE_BYTES = 1 << 30  # left to the rest of the machine

Engines = Mapping[str, OfflineEngine]
Say = Callable[[str], None]


class MemoryShortError(RuntimeError):
    """The engines do not fit into memory side by side."""


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    prompts: tuple[str, ...]
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    max_tokens: int
    repetitions: int

    def groups(self, batch: int) -> list[tuple[int, ...]]:
        """Numbers of the prompts that are sent together, `batch` of them in flight at a time."""
        return groups(len(self.prompts), ROUNDS * batch)

    def num_requests(self, num_engines: int) -> int:
        """Batches sent in all, for the progress bar."""
        per_engine = 0
        for batch in self.batches:
            count = len(self.groups(batch))
            per_engine += len(self.temperatures) * (1 + self.repetitions * count)
            per_engine += min(count, STAGE_GROUPS)
        return num_engines * per_engine


def compare_outputs(
    contenders: Sequence[Contender], missing: dict[str, str], setup: Setup, plan: Plan, say: Say
) -> dict[str, str]:
    """What each engine's float32 output is, compared with plain; one engine runs at a time.

    Args:
        contenders: plain first.
        missing: gains the engines of vLLM's that do not start, with the reason.

    Raises:
        OutputsDifferError: an engine of ours differs.
        EngineProcessError: plain or an engine of ours fails.
    """
    exact = replace(setup, eager=True, dtype="float32")
    asked = questions(len(plan.prompts), plan.batches, plan.temperatures)
    expected: Answers = []
    verdicts = {}
    for contender in contenders:
        say(f"Comparing outputs in float32: {contender.name}")
        try:
            with OfflineEngine(contender.settings(exact)) as engine:
                engine.wait_until_ready()
                answers = answer_all(engine, plan.prompts, asked)
        except EngineProcessError as error:
            _leave_out(contender, error, missing)
            continue
        if contender.name == PLAIN:
            expected = answers
        else:
            found = differences(contender.name, asked, expected, answers)
            verdicts[contender.name] = judge(found, contender.ours)
    return verdicts


def start(
    stack: ExitStack,
    contenders: Sequence[Contender],
    missing: dict[str, str],
    setup: Setup,
    say: Say,
) -> dict[str, OfflineEngine]:
    """Start the engines one after another, by name.

    Args:
        stack: ends them.
        missing: see `compare_outputs`; engines in it are not started.

    Raises:
        MemoryShortError: those not started yet would not fit.
        EngineProcessError: plain or an engine of ours fails.
    """
    engines: dict[str, OfflineEngine] = {}
    waiting = [contender for contender in contenders if contender.name not in missing]
    while waiting:
        contender = waiting.pop(0)
        say(f"Starting {contender.name} ({setup.dtype}, {'eager' if setup.eager else 'compiled'})")
        engine = stack.enter_context(OfflineEngine(contender.settings(setup)))
        try:
            engine.wait_until_ready()
        except EngineProcessError as error:
            engine.close()
            _leave_out(contender, error, missing)
            continue
        require_memory(len(waiting), engine.resident_bytes, available_bytes())
        engines[contender.name] = engine
    return engines


def _leave_out(contender: Contender, error: EngineProcessError, missing: dict[str, str]) -> None:
    if contender.ours or contender.name == PLAIN:
        raise EngineProcessError(f"{contender.name}: {error}") from None
    missing[contender.name] = str(error).splitlines()[0]


def require_memory(num_waiting: int, engine_bytes: int, available: int) -> None:
    """Raise MemoryShortError unless as many engines of this size fit into what is available."""
    needed = num_waiting * engine_bytes + SPARE_BYTES
    if num_waiting and needed > available:
        raise MemoryShortError(
            f"{num_waiting} more engines of {engine_bytes / 2**30:.1f} GiB need "
            f"{needed / 2**30:.1f} GiB with some to spare, but {available / 2**30:.1f} GiB are "
            "available: name fewer with --engines, or leave out variants"
        )


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def turns(names: Sequence[str], turn: int) -> list[str]:
    """The engines in the order of this turn: each goes first in one turn of as many as there are.

    Whoever follows another finds the machine as that one left it.
    """
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def measure(
    engines: Engines, plan: Plan, advance: Callable[[], None]
) -> Iterator[tuple[int, list[Run], list[StageTimes]]]:
    """Runs and stage times of one batch size after another, with that size."""
    for batch in plan.batches:
        runs = []
        for temperature in plan.temperatures:
            _warm_up(engines, plan, batch, temperature, advance)
            for repetition in range(plan.repetitions):
                runs += _repetition(engines, plan, batch, temperature, repetition, advance)
        yield batch, runs, _stages(engines, plan, batch, advance)


def _warm_up(
    engines: Engines, plan: Plan, batch: int, temperature: float, advance: Callable[[], None]
) -> None:
    """The first batch of a size may allocate and compile."""
    question = Question(groups(len(plan.prompts), batch)[0], temperature)
    for engine in engines.values():
        engine.generate_batch(question.batch(plan.prompts, WARM_UP_TOKENS))
        advance()


def _repetition(
    engines: Engines,
    plan: Plan,
    batch: int,
    temperature: float,
    repetition: int,
    advance: Callable[[], None],
) -> list[Run]:
    asked = plan.groups(batch)
    answers: dict[str, list[BatchCompletion]] = {name: [] for name in engines}
    for i, numbers in enumerate(asked):
        question = Question(numbers, temperature, repetition)
        request = question.batch(plan.prompts, plan.max_tokens, in_flight=batch)
        for name in turns(list(engines), repetition * len(asked) + i):
            answers[name].append(engines[name].generate_batch(request))
            advance()
    return [Run.of(batch, temperature, name, repetition, answers[name]) for name in engines]


def _stages(
    engines: Engines, plan: Plan, batch: int, advance: Callable[[], None]
) -> list[StageTimes]:
    """Stages of decode steps, in runs of their own: timing them costs a little."""
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for i, numbers in enumerate(plan.groups(batch)[:STAGE_GROUPS]):
        request = Question(numbers, 0.0).batch(
            plan.prompts, plan.max_tokens, in_flight=batch, time_stages=True
        )
        for name in turns(list(engines), i):
            steps[name] += engines[name].generate_batch(request).stages
            advance()
    return [stage_times(batch, name, steps[name]) for name in engines]
