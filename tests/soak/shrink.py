"""A round with a mismatch, made as small as still shows one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from tests.soak.engines import Laboratory
from tests.soak.rounds import Plan, answered, run_plan

_NEEDED = {"temperature", "seed", "max_tokens"}


def shrink(laboratory: Laboratory, plan: Plan, console: Console) -> Plan:
    """Leave out what the mismatch does not need: requests, events, then parameters.

    Args:
        laboratory: to try in.
        plan: of a round with a mismatch.
        console: says how far it is.
    """
    plan = _without_events(laboratory, plan)
    plan = _fewer_requests(laboratory, plan, console)
    return _fewer_parameters(laboratory, _without_events(laboratory, plan))


def _shows(laboratory: Laboratory, plan: Plan) -> bool:
    return bool(run_plan(laboratory, plan).mismatches)


def _without_events(laboratory: Laboratory, plan: Plan) -> Plan:
    for changes in (
        {"abort_after": None},
        {"medusa": None},
        {"arrival": 0},
        {"priority": 0},
    ):
        cases = [replace(case, **changes) for case in plan.cases]
        smaller = replace(plan, cases=cases)
        if smaller != plan and _shows(laboratory, smaller):
            plan = smaller
    smaller = replace(plan, reset_probability=0.0)
    return smaller if _shows(laboratory, smaller) else plan


def _fewer_requests(laboratory: Laboratory, plan: Plan, console: Console) -> Plan:
    size = len(plan.cases) // 2
    while size:
        for start in range(0, len(plan.cases), size)[::-1]:
            smaller = replace(plan, cases=plan.cases[:start] + plan.cases[start + size :])
            if smaller.cases and _shows(laboratory, smaller):
                plan = smaller
        console.print(f"{len(plan.cases)} requests left")
        size = min(size // 2, len(plan.cases) // 2)
    return plan


def _fewer_parameters(laboratory: Laboratory, plan: Plan) -> Plan:
    for index, case in enumerate(plan.cases):
        for name in case.params.keys() - _NEEDED:
            cases = list(plan.cases)
            params = {k: v for k, v in cases[index].params.items() if k != name}
            cases[index] = replace(case, params=params)
            smaller = answered(laboratory.plain, replace(plan, cases=cases))
            if _shows(laboratory, smaller):
                plan = smaller
    return plan


def describe(plan: Plan) -> Sequence[str]:
    """The requests of a small plan, to be typed again."""
    return [
        f"engine {plan.configuration}, seed {plan.seed}, resets {plan.reset_probability}, "
        f"log-probabilities {plan.logprobs_mode}",
        *(repr(case) for case in plan.cases),
    ]
