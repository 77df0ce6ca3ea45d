"""One round: requests from a seed, through plain vLLM and through one Medusa engine."""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tests.soak import cases
from tests.soak.cases import Case
from tests.soak.compare import TOLERANCE, Difference, broken_rules, differences
from tests.soak.drafts import Futures, MixedDrafter
from tests.soak.engines import CONFIGURATIONS, Engine, Laboratory, Outcome
from tests.soak.ties import logit_gap, nearest_gap

REQUESTS = 240
"""Of one round."""
MOST_GAPS = 10
"""That are looked for in a round: each takes plain vLLM many answers, and so many are no ties."""


@dataclass(frozen=True)
class Finding:
    """A difference, where it was found, and how far plain vLLM is from agreeing."""

    seed: int
    configuration: str
    case: str
    what: str
    is_tie: bool
    gap: float | None
    """Between the two tokens' logits, where tokens or ranks differ."""
    asked: dict[str, Any]


@dataclass
class RoundResult:
    """What a round found."""

    seed: int
    configuration: str
    compared: int = 0
    """Requests of which everything was compared with plain vLLM, up to an abort."""
    checked_by_rules: int = 0
    """Unseeded requests: no two answers are alike."""
    findings: list[Finding] = field(default_factory=list)
    leftovers: dict[str, int] = field(default_factory=dict)
    """Of both engines; all must be 0."""
    counts: Counter[str] = field(default_factory=Counter)
    """What was exercised, and how often."""
    seconds: float = 0.0

    @property
    def mismatches(self) -> list[Finding]:
        """Findings that rounding does not explain."""
        return [finding for finding in self.findings if not finding.is_tie]

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.mismatches and not any(self.leftovers.values())


@dataclass(frozen=True)
class Plan:
    """All of a round but the engines."""

    seed: int
    configuration: str
    cases: list[Case]
    reset_probability: float
    logprobs_mode: str
    expected: dict[str, Outcome] = field(default_factory=dict)
    """Plain answers of the determined requests."""
    futures: Futures = field(default_factory=dict)


def configuration_of(seed: int) -> str:
    """The engine that a round uses."""
    return list(CONFIGURATIONS)[seed % len(CONFIGURATIONS)]


def make_plan(plain: Engine, seed: int, configuration: str, count: int = REQUESTS) -> Plan:
    """The requests of a round and what plain vLLM answers."""
    pick = random.Random(seed)
    mood = cases.random_mood(pick)
    plain.set_logprobs_mode(mood.logprobs_mode)
    first = cases.random_cases(pick, mood, count * 2 // 3)
    expected = _plain_answers(plain, first)
    asked = [
        (
            case,
            expected[case.name].completions[0].token_ids,
            expected[case.name].completions[0].text,
        )
        for case in first
        if case.is_determined
    ]
    second = cases.follow_ups(pick, asked, count - len(first))
    plan = Plan(
        seed=seed,
        configuration=configuration,
        cases=sorted([*first, *second], key=lambda case: case.arrival),
        reset_probability=pick.choice([0.0, 0.0, 0.02]),
        logprobs_mode=mood.logprobs_mode,
    )
    return _with_futures(plain, plan, expected | _plain_answers(plain, second))


def answered(plain: Engine, plan: Plan) -> Plan:
    """`plan` with what plain vLLM answers to its requests now."""
    plain.set_logprobs_mode(plan.logprobs_mode)
    return _with_futures(plain, plan, _plain_answers(plain, plan.cases))


def _with_futures(plain: Engine, plan: Plan, expected: dict[str, Outcome]) -> Plan:
    return replace(plan, expected=expected, futures=_futures(plain, plan.cases, expected))


def _plain_answers(plain: Engine, asked: Sequence[Case]) -> dict[str, Outcome]:
    determined = [case for case in asked if case.is_determined]
    return plain.serve(determined, [case.sampling_params() for case in determined])


def _futures(plain: Engine, asked: Sequence[Case], expected: dict[str, Outcome]) -> Futures:
    """The answers, and where possible what would follow had they not stopped."""
    # What is beyond the end of a structure is not defined.
    free = [c for c in asked if c.is_determined and not c.params.get("structured_outputs")]
    longer = plain.serve(free, [case.unbounded_params() for case in free])
    futures = {}
    for name, outcome in expected.items():
        for index, completion in outcome.completions.items():
            known = completion.token_ids
            if name in longer:
                beyond = longer[name].completions[index].token_ids
                if beyond[: len(known)] == known:
                    known = beyond
            futures[name, index] = known
    return futures


def run_plan(laboratory: Laboratory, plan: Plan) -> RoundResult:
    """Serve a plan's requests with Medusa and compare."""
    engine = laboratory.medusa(plan.configuration)
    drafter = MixedDrafter(
        plan.cases,
        plan.futures,
        engine.heads,
        CONFIGURATIONS[plan.configuration].num_nodes,
        plan.seed,
    )
    engine.runner.drafter.drafter = drafter
    engine.set_logprobs_mode(plan.logprobs_mode)
    preempted = engine.preemptions
    result = RoundResult(plan.seed, plan.configuration)
    try:
        outcomes = engine.serve(
            plan.cases,
            [_with_options(case) for case in plan.cases],
            at_random=random.Random(plan.seed),
            reset_probability=plan.reset_probability,
        )
    except Exception as error:  # whatever ends an engine is a finding, and the run goes on
        laboratory.shut_down()
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"the engine failed: {error!r} in {where.filename}:{where.lineno}"
        result.findings.append(Finding(plan.seed, plan.configuration, "", what, False, None, {}))
        return result
    for case in plan.cases:
        for difference in _found(plan, case, outcomes[case.name]):
            judged = len(result.findings) < MOST_GAPS
            gap = _gap(laboratory.plain, plan, case, difference) if judged else None
            if judged and _is_rounding(laboratory, plan, case, difference):
                difference = replace(difference, is_rounding=True)
            result.findings.append(_finding(plan, case, difference, gap))
        result.compared += case.is_determined
        result.checked_by_rules += not case.is_determined
    result.counts = _counts(plan, outcomes) + Counter(
        {
            "verified trees": drafter.drafts,
            "branching trees": drafter.branching,
            "accepted tokens": drafter.accepted,
            "preemptions": engine.preemptions - preempted,
        }
    )
    result.leftovers = engine.leftovers()
    for name, number in laboratory.plain.leftovers().items():
        result.leftovers[f"plain: {name}"] = number
    return result


def run_round(
    laboratory: Laboratory, seed: int, configuration: str | None = None, count: int = REQUESTS
) -> RoundResult:
    """Plan and run; the same seed, configuration and count give the same round."""
    started = time.perf_counter()
    plan = make_plan(laboratory.plain, seed, configuration or configuration_of(seed), count)
    result = run_plan(laboratory, plan)
    result.seconds = time.perf_counter() - started
    return result


def _with_options(case: Case) -> Any:
    params = case.sampling_params()
    if case.medusa is not None:
        params.extra_args = {"medusa": case.medusa}
    return params


def _found(plan: Plan, case: Case, ours: Outcome) -> list[Difference]:
    if not case.is_determined:
        return broken_rules(case, ours)
    tolerance = TOLERANCE * case.amplification(plan.logprobs_mode)
    return differences(ours, plan.expected[case.name], tolerance)


def _finding(plan: Plan, case: Case, difference: Difference, gap: float | None) -> Finding:
    return Finding(
        plan.seed,
        plan.configuration,
        case.name,
        f"answer {difference.completion}, at {difference.position}: {difference.what}",
        difference.is_rounding or (gap is not None and gap < TOLERANCE),
        gap,
        _printable(case),
    )


def _gap(plain: Engine, plan: Plan, case: Case, difference: Difference) -> float | None:
    if difference.position is None:
        return None
    index = difference.completion
    known = plan.expected[case.name].completions[index].token_ids[: difference.position + 1]
    if difference.tokens is not None:
        return logit_gap(plain, case, index, known, difference.tokens[0])
    if difference.ranked is not None:
        return nearest_gap(plain, case, index, known, difference.ranked)
    return None


def _is_rounding(laboratory: Laboratory, plan: Plan, case: Case, difference: Difference) -> bool:
    """Whether scores differ by no more than two float32 models may at this place."""
    scored = difference.scored
    if scored is None:
        return False
    answer = plan.expected[case.name].completions[difference.completion].token_ids
    place = scored.position if scored.is_prompt else len(case.prompt) + scored.position
    error = laboratory.exact.rounding([*case.prompt, *answer][:place])
    return scored.difference <= 2 * error * case.amplification(plan.logprobs_mode)


def _printable(case: Case) -> dict[str, Any]:
    asked = asdict(case)
    asked["params"]["output_kind"] = str(case.params.get("output_kind"))
    asked["prompt"] = len(case.prompt)
    return asked


def _counts(plan: Plan, outcomes: dict[str, Outcome]) -> Counter[str]:
    counts: Counter[str] = Counter({plan.logprobs_mode: len(plan.cases)})
    for case in plan.cases:
        counts.update(f"asked {name}" for name, value in case.params.items() if value is not None)
        counts["asked greedy"] += case.params["temperature"] == 0
        counts["asked medusa options"] += case.medusa is not None
        counts["follow-ups"] += case.name.startswith("f")
        outcome = outcomes[case.name]
        counts["aborted"] += outcome.aborted
        for completion in outcome.completions.values():
            counts[f"finished by {completion.finish_reason}"] += 1
            counts["tokens"] += len(completion.token_ids)
    return counts
