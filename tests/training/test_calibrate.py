"""Calibration: what it recovers from known data, and what counts as a judgement."""

from __future__ import annotations

import math

import numpy as np
import pytest

from medusa_plugin.training.calibrate import (
    Judgements,
    accuracies,
    fit_heads,
    fit_scaling,
    futures,
    judge,
    split,
)
from medusa_plugin.training.record import Answer
from medusa_plugin.tree.estimate import HeadCalibration


def outcomes(
    calibration: HeadCalibration, count: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities, their log-odds, and hits drawn as `calibration` says."""
    rng = np.random.default_rng(seed)
    odds = rng.normal(-1.0, 2.0, count)
    right = 1 / (1 + np.exp(-(calibration.bias + calibration.scale * odds)))
    return -np.log1p(np.exp(-odds)), odds, rng.random(count) < right


def judgements(calibration: HeadCalibration, count: int, seed: int) -> Judgements:
    logs, _, hits = outcomes(calibration, count, seed)
    reached = np.ones((count, 1), bool)
    return Judgements(logs.astype(np.float32)[:, None, None], hits[:, None, None], reached)


def answer(tokens: list[int], candidates: list[list[list[int]]]) -> Answer:
    shape = np.array(candidates).shape
    logs = np.log(np.full(shape, 0.25, np.float32))
    return Answer(np.array(tokens), np.array(candidates), logs)


# After token i head h should propose token i + 1 + h: of 5, 6, 7 that is 6 and 7, 7 and none.
SMALL = answer([5, 6, 7], [[[6, 0], [0, 7]], [[0, 1], [7, 8]], [[9, 9], [9, 9]]])


@pytest.mark.parametrize(
    "known", [HeadCalibration(), HeadCalibration(-0.7, 0.6), HeadCalibration(0.5, 1.6)]
)
def test_a_known_scaling_is_recovered(known: HeadCalibration) -> None:
    _, odds, hits = outcomes(known, 20_000, seed=1)
    fitted = fit_scaling(odds, hits)
    assert fitted.bias == pytest.approx(known.bias, abs=0.08)
    assert fitted.scale == pytest.approx(known.scale, abs=0.08)


@pytest.mark.parametrize("hit", [False, True])
@pytest.mark.parametrize("count", [1, 50])
def test_one_sided_judgements_stay_finite(count: int, hit: bool) -> None:
    fitted = fit_scaling(np.full(count, -1.0), np.full(count, hit))
    assert math.isfinite(fitted.bias) and fitted.scale > 0
    assert (fitted.bias - fitted.scale > -1) == hit


def test_nothing_to_fit_on_is_the_identity() -> None:
    assert fit_scaling(np.zeros(0), np.zeros(0, bool)) == HeadCalibration()


def test_a_fit_is_used_only_where_it_is_better_on_held_out_answers() -> None:
    skewed = HeadCalibration(-1.5, 0.5)
    (fit,) = fit_heads(judgements(skewed, 4000, 2), judgements(skewed, 1000, 3), 1)
    assert fit.calibration == fit.fitted != HeadCalibration()
    assert fit.log_loss[1] < fit.log_loss[0] and fit.error[1] < fit.error[0]
    assert (fit.judged, fit.held_out) == (4000, 1000)
    honest = judgements(HeadCalibration(), 1000, 4)
    (fit,) = fit_heads(judgements(skewed, 4000, 2), honest, 1)
    assert fit.calibration == HeadCalibration() != fit.fitted


def test_candidates_are_judged_by_what_follows() -> None:
    assert futures(SMALL).tolist() == [[6, 7], [7, -1], [-1, -1]]
    found = judge([SMALL], 4)
    assert found.hits.astype(int).tolist() == [
        [[1, 0], [0, 1]],
        [[0, 0], [0, 0]],  # 7 came one token earlier than head 1 said
        [[0, 0], [0, 0]],
    ]
    # A head's turn comes where the answer goes on and the path before it was offered.
    assert found.reached.astype(int).tolist() == [[1, 1], [1, 0], [0, 0]]
    assert accuracies(found).tolist() == [[0.5, 0.0], [0.0, 1.0]]


def test_a_path_that_no_tree_of_that_size_holds_is_not_reached() -> None:
    third = answer([5, 6, 7], [[[0, 1, 6], [7, 1, 2]]] * 3)
    assert judge([third], 3).reached[0].tolist() == [True, True]
    assert judge([third], 2).reached[0].tolist() == [True, False]


def test_one_answer_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="1 answers: calibration needs at least 2"):
        split([SMALL])
    fit, held_out = split([SMALL] * 9)
    assert (len(fit), len(held_out)) == (6, 3)
