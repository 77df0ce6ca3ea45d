"""Estimates against laws whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from medusa_plugin.tree.estimate import HeadCalibration, HeadsEstimate, TreesEstimate

PLAIN = [HeadCalibration(), HeadCalibration()]


def run(
    estimate: HeadsEstimate,
    rng: np.random.Generator,
    steps: int,
    claimed: float,
    truth: dict[str, float],
    second: float = 0.5,
) -> dict[str, float]:
    """One candidate per head, claimed right with `claimed`; right with `truth` by request.

    Returns the last estimate of the first head's candidate by request.
    """
    names = list(truth)
    last = {}
    tokens = np.zeros((len(names), 2, 1), np.int64)
    tokens[:, 1] = 1
    for _ in range(steps):
        logs = np.log(np.full((len(names), 2, 1), claimed, np.float32))
        probs = np.exp(estimate.estimate(names, tokens, logs))
        last = dict(zip(names, probs[:, 0, 0].tolist(), strict=True))
        emitted = []
        for name in names:
            if rng.random() < truth[name]:
                emitted.append([0, 1 if rng.random() < second else 9])
            else:
                emitted.append([9])
        estimate.observe(names, emitted)
    return last


def test_without_evidence_the_calibration_speaks() -> None:
    logs = np.log(np.array([[[0.5, 0.2], [0.3, 0.1]]], np.float32))
    tokens = np.array([[[1, 2], [3, 4]]])
    same = HeadsEstimate(PLAIN).estimate(["a"], tokens, logs)
    assert np.exp(same) == pytest.approx(np.exp(logs), abs=1e-5)
    scaled = HeadsEstimate([HeadCalibration(-1.0, 2.0), HeadCalibration()])
    odds = np.log(0.2 / 0.8)
    found = np.exp(scaled.estimate(["a"], tokens, logs))
    assert found[0, 0, 1] == pytest.approx(1 / (1 + np.exp(1 - 2 * odds)), rel=1e-4)


def test_heads_that_claim_too_much_or_too_little_are_corrected() -> None:
    for claimed, truth in ((0.8, 0.3), (0.2, 0.6)):
        estimate = HeadsEstimate(PLAIN)
        requests = {f"r{i}": truth for i in range(20)}
        found = run(estimate, np.random.default_rng(0), 100, claimed, requests, second=truth)
        assert np.mean(list(found.values())) == pytest.approx(truth, rel=0.2)
        # The second head is judged only where the first was right.
        assert estimate.head_ratios()[1] == pytest.approx(truth / claimed, rel=0.2)


def test_a_request_that_never_accepts_falls_and_comes_back() -> None:
    estimate = HeadsEstimate(PLAIN)
    rng = np.random.default_rng(1)
    truth = {f"r{i}": 0.5 for i in range(8)} | {"bad": 0.0}
    found = run(estimate, rng, 40, 0.5, truth)
    assert found["bad"] < 0.3 * np.mean([found[f"r{i}"] for i in range(8)])
    truth["bad"] = 0.5
    assert run(estimate, rng, 80, 0.5, truth)["bad"] > 0.3


def test_a_lost_record_fades_without_new_evidence() -> None:
    estimate = HeadsEstimate(PLAIN)
    low = run(estimate, np.random.default_rng(2), 40, 0.5, {"bad": 0.0})["bad"]
    for _ in range(200):  # steps in which nothing was drafted
        estimate.observe(["bad"], [[9]])
    later = run(estimate, np.random.default_rng(2), 1, 0.5, {"bad": 0.0})["bad"]
    assert later > 2 * low


def test_ended_requests_are_forgotten() -> None:
    estimate = HeadsEstimate(PLAIN)
    run(estimate, np.random.default_rng(3), 5, 0.5, {"a": 0.5, "b": 0.5})
    estimate.forget(["a", "unknown"])
    assert set(estimate._requests) == {"b"}
    estimate.estimate(["b"], np.zeros((1, 2, 1), np.int64), np.zeros((1, 2, 1), np.float32))
    estimate.forget(["b"])
    assert not estimate._requests and not estimate._offers


def test_estimates_never_exceed_certainty() -> None:
    estimate = HeadsEstimate(PLAIN)
    found = run(estimate, np.random.default_rng(4), 60, 0.3, {"a": 1.0})
    assert found["a"] <= 1
    zero = estimate.estimate(
        ["a"], np.zeros((1, 2, 2), np.int64), np.full((1, 2, 2), -np.inf, np.float32)
    )
    assert (zero < -10).all() and not np.isnan(zero).any()


def test_trees_that_yield_less_than_expected_lower_the_ratio() -> None:
    estimate = TreesEstimate()
    assert estimate.ratio == 1
    for step in range(400):
        estimate.expect("a", 4, 1.5)
        estimate.expect("b", 2, 0.5)
        estimate.observe("a", 4, step % 2)
        estimate.observe("b", 2, 1 if step % 4 == 0 else 0)
    assert estimate.ratio == pytest.approx(0.75 / 2.0, rel=0.1)
    for _ in range(600):  # another text: what was learnt fades
        estimate.expect("a", 4, 1.5)
        estimate.observe("a", 4, 3)
    assert estimate.ratio > 1.5


def test_only_trees_that_were_granted_as_a_whole_are_judged() -> None:
    estimate = TreesEstimate()
    estimate.expect("a", 4, 3.0)
    estimate.observe("a", 2, 0)  # the scheduler had less room
    estimate.observe("a", 4, 0)  # nothing is noted any more
    estimate.observe("never seen", 4, 0)
    estimate.expect("ended", 4, 3.0)
    estimate.forget(["ended", "never seen"])
    estimate.observe("ended", 4, 0)
    assert estimate.ratio == 1
