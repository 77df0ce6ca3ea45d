"""`DraftSwitch` against machines where drafting pays, loses, or does now the one, now the other."""

from __future__ import annotations

import numpy as np
import pytest

from medusa_plugin.tree.switch import DraftSwitch


class Machine:
    """Steps of a batch: what they gain and take on average is given, chance does the rest."""

    def __init__(self, noise: float = 0.05, seed: int = 1) -> None:
        self.switch = DraftSwitch()
        self._rng = np.random.default_rng(seed)
        self._noise = noise
        self._verifies = False

    def drafted(self, steps: int, load: int, tokens: float, seconds: float) -> int:
        """Steps of so many that drafted; they gain `tokens` per request in `seconds`, plain 1."""
        count = 0
        for _ in range(steps):
            drafts = self.switch.should_draft(load)
            gained = load
            if self._verifies:
                gained += int(self._rng.binomial(4 * load, (tokens - 1) / 4))
            taken = 1.0 + (seconds - 1) * (0.3 * drafts + 0.7 * self._verifies)
            self.switch.observe(load, gained, taken * self._rng.normal(1.0, self._noise))
            self._verifies = drafts
            count += drafts
        return count


@pytest.mark.parametrize("load", [1, 8, 32])
def test_drafting_that_pays_goes_on(load: int) -> None:
    assert Machine().drafted(2000, load, 2.0, 1.5) > 1900


def test_a_lone_request_does_not_lose_its_trees_to_chance() -> None:
    counts = [Machine(seed=seed).drafted(1000, 1, 1.4, 1.2) for seed in range(20)]
    assert min(counts) > 900


@pytest.mark.parametrize("load", [1, 8, 32])
def test_drafting_that_loses_is_nearly_all_skipped(load: int) -> None:
    assert Machine().drafted(2000, load, 1.0, 1.2) < 100


@pytest.mark.parametrize("load", [4, 8, 32])
def test_finding_out_that_drafting_loses_takes_few_steps(load: int) -> None:
    counts = [Machine(seed=seed).drafted(128, load, 1.2, 1.6) for seed in range(20)]
    assert max(counts) <= 16


def test_less_load_is_tried_at_once_and_remembered() -> None:
    machine = Machine()
    machine.drafted(500, 32, 1.0, 1.5)
    assert machine.drafted(8, 2, 2.0, 1.2) == 8
    machine.drafted(200, 2, 2.0, 1.2)
    assert machine.drafted(100, 32, 1.0, 1.5) <= 8
    assert machine.drafted(100, 2, 2.0, 1.2) >= 92


def test_what_changes_is_found_out() -> None:
    machine = Machine()
    machine.drafted(1000, 8, 1.0, 1.5)
    machine.drafted(300, 8, 2.0, 1.5)  # the texts are of another kind now
    assert machine.drafted(1000, 8, 2.0, 1.5) > 930
    machine.drafted(100, 8, 1.0, 1.5)
    assert machine.drafted(1000, 8, 1.0, 1.5) < 70


def test_steps_between_the_kinds_are_not_judged() -> None:
    machine = Machine(noise=0.0)
    machine.drafted(40, 4, 5.0, 1.5)  # all drafts are right
    record = machine.switch._records[(4).bit_length()]
    assert record.drafted.tokens.value == 5.0 and record.plain.tokens.value == 1.0
    assert record.drafted.seconds.value == pytest.approx(1.5)
    assert record.plain.seconds.value == pytest.approx(1.0)


def test_without_observations_both_kinds_take_turns() -> None:
    switch = DraftSwitch()
    kinds = [switch.should_draft(3) for _ in range(200)]
    assert 60 < sum(kinds) < 140
