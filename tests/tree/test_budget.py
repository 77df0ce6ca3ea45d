"""Sizes against a search over all of them; costs that are learnt."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from medusa_plugin.tree.budget import CostCurve, CostLearner, StepCosts, choose_sizes

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
        costs = StepCosts(curve, NOTHING, *rng.random(3).tolist())
        spent = float(rng.choice([0.0, 0.7]))

        def rate(
            sizes: tuple[int, ...], probs=probs, costs=costs, batch=batch, spent=spent
        ) -> float:
            gained = sum(float(probs[i, :size].sum()) for i, size in enumerate(sizes))
            rows = np.array([batch + sum(sizes)], float)
            extra = spent + costs.per_request * batch + costs.per_node * sum(sizes)
            extra += costs.per_request_with_trees * batch * (sum(sizes) > 0)
            return (batch + gained) / (extra + float(costs.verify.at(rows)[0]))

        allowed = [
            sizes
            for sizes in itertools.product(*(range(limit + 1) for limit in limits))
            if sum(sizes) <= max_nodes
        ]
        chosen = tuple(choose_sizes(probs, limits, costs, max_nodes, spent).tolist())
        best = max(rate(sizes) for sizes in allowed)
        assert rate(chosen) == pytest.approx(best)
        assert chosen in allowed


def test_trees_shrink_as_the_batch_grows_and_vanish_when_they_lose() -> None:
    costs = StepCosts(FREE_TO_SIX, NOTHING)
    probs = np.array([0.4, 0.2, 0.12, 0.09, 0.06, 0.04, 0.03])
    mean = [
        choose_sizes(np.tile(probs, (batch, 1)), np.full(batch, 7), costs, 1000).mean()
        for batch in (1, 4, 8, 32)
    ]
    assert mean[0] == 5  # up to where a row begins to cost
    assert max(mean[1:]) <= 2
    assert mean[-1] == 0
    steep = StepCosts(CostCurve((1, 64), (0.001, 0.064)), NOTHING)
    sizes = choose_sizes(np.tile(probs, (32, 1)), np.full(32, 7), steep, 1000)
    assert sizes.tolist() == [0] * 32
    # Where the step is long anyway, the same node pays.
    assert choose_sizes(np.tile(probs, (32, 1)), np.full(32, 7), steep, 1000, spent=0.2).sum() > 0


def test_no_candidates_no_nodes() -> None:
    sizes = choose_sizes(np.zeros((2, 0)), np.array([5, 5]), StepCosts(FREE_TO_SIX, NOTHING), 10)
    assert sizes.tolist() == [0, 0]


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


def known(rows: int) -> float:
    return float(FREE_TO_SIX.at(np.array([rows], float))[0])


def test_what_requests_trees_and_nodes_add_is_learnt() -> None:
    rng = np.random.default_rng(6)
    learner = CostLearner(StepCosts(FREE_TO_SIX, NOTHING))
    for _ in range(200):
        requests, nodes = int(rng.integers(4, 8)), int(rng.integers(0, 30))
        nodes *= int(rng.integers(0, 3) > 0)
        seconds = known(requests + nodes) + 0.002 * requests + 0.0004 * nodes
        seconds += 0.001 * requests * (nodes > 0)
        learner.observe(requests, nodes, seconds * rng.uniform(0.98, 1.02))
    assert learner.costs.per_request == pytest.approx(0.002, rel=0.1)
    assert learner.costs.per_request_with_trees == pytest.approx(0.001, rel=0.25)
    assert learner.costs.per_node == pytest.approx(0.0004, rel=0.25)
    for _ in range(400):  # what nodes cost is not forgotten while there are none
        learner.observe(8, 0, known(8) + 0.016)
    assert learner.costs.per_node == pytest.approx(0.0004, rel=0.25)
    assert learner.costs.per_request == pytest.approx(0.002, rel=0.1)


def test_a_lone_request_does_not_make_nodes_look_dear() -> None:
    rng = np.random.default_rng(7)
    learner = CostLearner(StepCosts(FREE_TO_SIX, NOTHING))
    for _ in range(60):  # the step's overhead is large and the same for all sizes
        nodes = int(rng.integers(3, 7))
        learner.observe(1, nodes, known(1 + nodes) + 0.009 + rng.normal(0, 0.0003))
    assert learner.costs.per_node < 0.0002
    assert learner.costs.step(1, np.array([4.0]))[0] == pytest.approx(known(5) + 0.009, rel=0.02)


def test_another_load_is_learnt_by_itself() -> None:
    learner = CostLearner(StepCosts(FREE_TO_SIX, NOTHING))
    for _ in range(50):
        learner.observe(1, 4, known(5) + 0.009)
    for _ in range(3):
        learner.observe(8, 8, known(16) + 0.012)
    assert learner.costs.per_node == 0
    assert learner.costs.step(8, np.array([8.0]))[0] == pytest.approx(known(16) + 0.012)


def test_one_hiccup_is_not_the_rule() -> None:
    learner = CostLearner(StepCosts(FREE_TO_SIX, NOTHING))
    for _ in range(100):
        learner.observe(4, 8, known(12))
    learner.observe(4, 8, 10.0)
    assert learner.costs.step(4, np.array([8.0]))[0] < 1.2 * known(12)
