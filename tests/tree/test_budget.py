"""Sizes against a search over all of them; the switch against its rules."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from medusa_plugin.tree.budget import CostCurve, CostLearner, DraftSwitch, StepCosts, choose_sizes

FREE_TO_SIX = CostCurve((1, 6, 8, 16, 32), (0.015, 0.015, 0.018, 0.024, 0.040))
NOTHING = CostCurve((1,), (0.0,))


def test_sizes_maximise_tokens_per_second() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        batch, n = int(rng.integers(1, 4)), 4
        probs = -np.sort(-rng.random((batch, n)).cumprod(1), axis=1)
        limits = rng.integers(0, n + 1, batch)
        max_nodes = int(rng.integers(0, 13))
        times = np.cumsum(rng.random(6)) + 0.5
        curve = CostCurve((1, 2, 4, 6, 9, 16), tuple(times))
        costs = StepCosts(curve, NOTHING, rng.random(), rng.random())

        def rate(sizes: tuple[int, ...], probs=probs, costs=costs, batch=batch) -> float:
            gained = sum(float(probs[i, :size].sum()) for i, size in enumerate(sizes))
            rows = np.array([batch + sum(sizes)], float)
            extra = costs.per_request * batch + costs.per_node * sum(sizes)
            return (batch + gained) / (extra + float(costs.verify.at(rows)[0]))

        allowed = [
            sizes
            for sizes in itertools.product(*(range(limit + 1) for limit in limits))
            if sum(sizes) <= max_nodes
        ]
        chosen = choose_sizes(probs, limits, costs, max_nodes)
        best = max(rate(sizes) for sizes in allowed)
        assert rate(tuple(chosen.nodes.tolist())) == pytest.approx(best)
        assert tuple(chosen.nodes.tolist()) in allowed
        assert chosen.gain == pytest.approx(best / rate((0,) * batch))


def test_trees_shrink_as_the_batch_grows_and_vanish_when_they_lose() -> None:
    costs = StepCosts(FREE_TO_SIX, NOTHING)
    probs = np.array([0.4, 0.2, 0.12, 0.09, 0.06, 0.04, 0.03])
    mean = [
        choose_sizes(np.tile(probs, (batch, 1)), np.full(batch, 7), costs, 1000).nodes.mean()
        for batch in (1, 4, 8, 32)
    ]
    assert mean[0] == 5  # up to where a row begins to cost
    assert max(mean[1:]) <= 2
    assert mean[-1] == 0
    steep = StepCosts(CostCurve((1, 64), (0.001, 0.064)), NOTHING)
    sizes = choose_sizes(np.tile(probs, (32, 1)), np.full(32, 7), steep, 1000)
    assert sizes.nodes.tolist() == [0] * 32 and sizes.gain == 1


def test_no_candidates_no_nodes() -> None:
    sizes = choose_sizes(np.zeros((2, 0)), np.array([5, 5]), StepCosts(FREE_TO_SIX, NOTHING), 10)
    assert sizes.nodes.tolist() == [0, 0]


def test_noise_does_not_make_more_rows_cheaper() -> None:
    curve = CostCurve((1, 4, 8), (2.0, 1.0, 3.0))
    assert curve.at(np.array([1.0, 2, 4, 6, 8, 12])).tolist() == [2, 2, 2, 2.5, 3, 4]


@pytest.mark.parametrize(("rows", "seconds"), [((), ()), ((2, 1), (1.0, 1.0)), ((1,), (1.0, 2.0))])
def test_a_curve_must_be_one(rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="cost curve"):
        CostCurve(rows, seconds)


def test_noise_of_a_curve() -> None:
    assert CostCurve((1, 2, 4), (1.0, 1.0, 3.0)).noise == 1
    assert CostCurve((1, 2, 4), (1.0, 6.0, 3.0)).noise == 2


def test_what_requests_and_nodes_add_is_learnt() -> None:
    rng = np.random.default_rng(6)
    learner = CostLearner(StepCosts(FREE_TO_SIX, NOTHING))
    for _ in range(200):
        requests, nodes = int(rng.integers(6, 9)), int(rng.integers(0, 30))
        rows = np.array([requests + nodes], float)
        seconds = float(FREE_TO_SIX.at(rows)[0]) + 0.002 * requests + 0.0004 * nodes
        learner.observe(requests, nodes, seconds * rng.uniform(0.97, 1.03))
    assert learner.costs.per_request == pytest.approx(0.002, rel=0.15)
    assert learner.costs.per_node == pytest.approx(0.0004, rel=0.25)
    for _ in range(400):  # nodes that were not tried for long are tried again
        learner.observe(8, 0, float(FREE_TO_SIX.at(np.array([8.0]))[0]) + 0.016)
    assert learner.costs.per_node < 0.0001
    assert learner.costs.per_request == pytest.approx(0.002, rel=0.1)


def test_one_hiccup_is_not_the_rule() -> None:
    learner = CostLearner(StepCosts(FREE_TO_SIX, NOTHING))
    for _ in range(100):
        learner.observe(4, 8, float(FREE_TO_SIX.at(np.array([12.0]))[0]))
    learner.observe(4, 8, 10.0)
    assert learner.costs.step(4, np.array([8.0]))[0] < 1.2 * FREE_TO_SIX.at(np.array([12.0]))[0]


def drafts_in(switch: DraftSwitch, steps: int, load: int, gain: float) -> int:
    count = 0
    for _ in range(steps):
        if switch.should_draft(load):
            count += 1
            switch.judge(gain, 0.05)
    return count


def test_the_switch_goes_off_looks_again_and_recovers() -> None:
    switch = DraftSwitch()
    assert drafts_in(switch, 50, 4, 1.2) == 50
    assert drafts_in(switch, 2000, 32, 1.02) < 60, "drafting that loses is nearly all skipped"
    assert drafts_in(switch, 500, 32, 1.2) >= 400, "candidates are better again: a look finds it"
    drafts_in(switch, 2000, 32, 1.0)
    assert drafts_in(switch, 20, 2, 1.2) == 20, "less load: at once"


def test_one_bad_step_does_not_switch_off() -> None:
    switch = DraftSwitch()
    for _ in range(20):
        assert switch.should_draft(1)
        switch.judge(1.0, 0.05)
        assert switch.should_draft(1)
        switch.judge(1.3, 0.05)
