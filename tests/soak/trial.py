"""Whether the fuzzer finds planted faults, and after how many requests."""

from __future__ import annotations

from rich.console import Console

from tests.soak.engines import Laboratory
from tests.soak.faults import FAULTS
from tests.soak.rounds import CONFIGURATIONS, RoundResult, run_round

MOST_ROUNDS = 2 * len(CONFIGURATIONS)
REQUESTS = 90
"""Of a round."""


def try_faults(laboratory: Laboratory, console: Console, wanted: str) -> list[str]:
    """Plant the fault that is wanted, or all, and run until it is found; returns the missed."""
    missed = []
    for name, plant in FAULTS.items():
        if wanted not in ("all", name):
            continue
        compared = 0
        found: RoundResult | None = None
        for seed in range(MOST_ROUNDS):
            with plant():
                result = run_round(laboratory, seed, count=REQUESTS)
            compared += result.compared + result.checked_by_rules
            if not result.is_clean:
                found = result
                break
        if found is None:
            missed.append(name)
            console.print(f"{name}: NOT FOUND in {compared} requests", markup=False)
            continue
        laboratory.shut_down()
        what = found.mismatches[0].what if found.mismatches else str(_left(found))
        console.print(
            f"{name}: found within {compared} requests ({found.configuration}, "
            f"{len(found.mismatches)} mismatches): {what[:150]}",
            markup=False,
            highlight=False,
        )
    return missed


def _left(result: RoundResult) -> dict[str, int]:
    return {name: number for name, number in result.leftovers.items() if number}
