"""What is concluded from the runs. Plain Python only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode.engines import CHAIN, NGRAM, OURS, PLAIN, SUFFIX
from medusa_plugin.vllm_glue.offline_engine import BatchCompletion
from medusa_plugin.vllm_glue.stage_clock import TARGET_STAGES

RIVALS = {CHAIN: "vs_chain_medusa", NGRAM: "vs_ngram", SUFFIX: "vs_suffix"}
SLOWEST_LEFT_OUT = 0.1  # of the steps: the machine was busy with something else


@dataclass(frozen=True)
class Run:
    """A repetition: all prompts answered by one engine, in batches of one size."""

    batch: int
    temperature: float
    engine: str
    repetition: int
    tokens: int
    seconds: float
    decode_tokens: int
    """Tokens without the first of each request, which comes from its prefill."""
    decode_steps: int
    """Steps in which a request gained those, summed over requests."""
    drafted: int
    accepted: int

    @classmethod
    def of(
        cls,
        batch: int,
        temperature: float,
        engine: str,
        repetition: int,
        answers: Sequence[BatchCompletion],
    ) -> Run:
        """The sum of `answers`."""
        lengths = [len(tokens) for answer in answers for tokens in answer.token_ids]
        steps = [steps for answer in answers for steps in answer.request_steps]
        return cls(
            batch,
            temperature,
            engine,
            repetition,
            tokens=sum(lengths),
            seconds=sum(answer.seconds for answer in answers),
            decode_tokens=sum(lengths) - len(lengths),
            decode_steps=sum(steps) - len(steps),
            drafted=sum(answer.drafted for answer in answers),
            accepted=sum(answer.accepted for answer in answers),
        )

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class StageTimes:
    """Where the time of an engine's decode steps went."""

    batch: int
    engine: str
    steps: int
    milliseconds: dict[str, float]
    """Of each stage and the rest; they add up to the step."""
    overhead_fraction: float
    """Share of the step that is not the target's forward pass with its lm_head."""


def stage_times(batch: int, engine: str, steps: Sequence[Mapping[str, float]]) -> StageTimes:
    """Means over the steps, the slowest left out so that a hiccup of the machine does not count.

    Args:
        batch: size of the batches.
        engine: which one it was.
        steps: seconds of each step ("step") and of its stages; at least one.
    """
    kept = sorted(steps, key=lambda times: times["step"])
    kept = kept[: max(1, round(len(kept) * (1 - SLOWEST_LEFT_OUT)))]
    stages = dict.fromkeys(stage for times in kept for stage in times if stage != "step")
    mean = {s: 1e3 * statistics.fmean(times.get(s, 0.0) for times in kept) for s in stages}
    whole = 1e3 * statistics.fmean(times["step"] for times in kept)
    target = sum(mean.get(stage, 0.0) for stage in TARGET_STAGES)
    mean["rest"] = whole - sum(mean.values())
    rounded = {stage: round(value, 4) for stage, value in mean.items()}
    return StageTimes(batch, engine, len(kept), rounded, round(1 - target / whole, 4))


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, least and greatest."""
    middle = statistics.median(values)
    return {
        "median": round(middle, digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def paired(
    runs: Sequence[Run], batch: int, temperature: float, over: str, under: str
) -> list[float]:
    """Tokens per second of engine `over` over those of `under`, repetition by repetition.

    Noise that hits a whole repetition hits both.
    """

    def rates(engine: str) -> dict[int, float]:
        return {
            run.repetition: run.rate
            for run in runs
            if (run.batch, run.temperature, run.engine) == (batch, temperature, engine)
        }

    theirs = rates(under)
    return [rate / theirs[i] for i, rate in rates(over).items() if i in theirs]


def cells(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One record per batch size, temperature and engine, in the order of the runs."""
    grouped: dict[tuple[int, float, str], list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.batch, run.temperature, run.engine), []).append(run)
    records = []
    for (batch, temperature, engine), mine in grouped.items():
        drafted = sum(run.drafted for run in mine)
        steps = sum(run.decode_steps for run in mine)
        records.append(
            {
                "batch": batch,
                "temperature": temperature,
                "engine": engine,
                "tokens_per_second": spread([run.rate for run in mine], 2),
                "of_plain": spread(paired(runs, batch, temperature, engine, PLAIN)),
                "tokens_per_step": round(sum(r.decode_tokens for r in mine) / max(steps, 1), 3),
                "drafts_accepted": round(sum(r.accepted for r in mine) / drafted, 4)
                if drafted
                else None,
            }
        )
    return records


def summarise(
    runs: Sequence[Run], stages: Sequence[StageTimes], missing: Mapping[str, str]
) -> dict[str, Any]:
    """The figures of record: ours, at the lowest temperature measured, which is greedy by default.

    Single figures are for batch 1; null where that was not measured, or with a reason.

    Args:
        runs: of all engines.
        stages: of all engines.
        missing: why an engine took no part.
    """
    batches = list(dict.fromkeys(run.batch for run in runs))
    temperatures = sorted({run.temperature for run in runs})
    lowest = temperatures[0] if temperatures else 0.0
    engines = list(dict.fromkeys(run.engine for run in runs))

    def by_batch(over: str, under: str, temperature: float = lowest) -> dict[str, float]:
        ratios = {b: paired(runs, b, temperature, over, under) for b in batches}
        return {str(b): round(statistics.median(r), 3) for b, r in ratios.items() if r}

    per_step = {
        str(cell["batch"]): cell["tokens_per_step"]
        for cell in cells(runs)
        if (cell["engine"], cell["temperature"]) == (OURS, lowest)
    }
    overhead = {(t.batch, t.engine): t.overhead_fraction for t in stages}
    summary: dict[str, Any] = {
        "temperature": lowest,
        "speedup_by_batch": by_batch(OURS, PLAIN),
        "tokens_per_step": per_step.get("1"),
        "tokens_per_step_by_batch": per_step,
    }
    for rival, name in RIVALS.items():
        ratios = by_batch(OURS, rival)
        summary[name] = ratios.get("1")
        if rival not in engines:
            summary[f"{name}_reason"] = missing.get(rival, "not asked for with --engines")
        summary[f"{name}_by_batch"] = ratios
    summary["overhead_fraction"] = overhead.get((1, OURS))
    summary["overhead_fraction_plain"] = overhead.get((1, PLAIN))
    summary["speedup_by_engine"] = {e: by_batch(e, PLAIN) for e in engines if e != PLAIN}
    summary["speedup_by_batch_sampled"] = {
        str(temperature): by_batch(OURS, PLAIN, temperature) for temperature in temperatures[1:]
    }
    return summary
