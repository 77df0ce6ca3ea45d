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
    log_odds,
    split,
)
from medusa_plugin.training.record import Answer
from medusa_plugin.tree.estimate import HeadCalibration, HeadsEstimate


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
    # Not sure of itself either: 50 of 50 are no proof of one in 10,000.
    assert abs(fitted.bias - fitted.scale) < math.log(10_000)


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


def test_only_turns_and_candidates_that_count_are_fitted() -> None:
    skewed = HeadCalibration(-1.5, 0.5)
    first = judgements(skewed, 500, 5)
    never = np.zeros((500, 1), bool)
    # A second candidate and 500 more turns, all of them right: both would move the fit.
    wide = Judgements(
        np.tile(first.log_probs, (2, 1, 2)),
        np.concatenate([np.tile(first.hits, 2), np.ones((500, 1, 2), bool)]),
        np.concatenate([first.reached, never]),
    )
    wide.hits[:, :, 1] = True
    assert fit_heads(wide, wide, 1) == fit_heads(first, first, 1)
    assert fit_heads(wide, wide, 2) != fit_heads(first, first, 1)


def test_a_head_whose_turn_never_came_keeps_the_identity() -> None:
    known = judgements(HeadCalibration(-1.5, 0.5), 100, 6)
    never = Judgements(known.log_probs, known.hits, np.zeros((100, 1), bool))
    (fit,) = fit_heads(never, known, 1)
    assert fit.calibration == fit.fitted == HeadCalibration() and fit.judged == 0
    (fit,) = fit_heads(known, never, 1)
    assert fit.calibration == HeadCalibration() != fit.fitted, "nothing shows that it is better"
    assert fit.log_loss == fit.error == (0, 0) and fit.held_out == 0


def test_log_odds_are_those_that_engines_scale() -> None:
    known = HeadCalibration(-0.4, 0.7)
    logs = np.array([0, -1e-4, -0.3, -2, -40, -np.inf], np.float32)
    odds = log_odds(logs)
    assert np.isfinite(odds).all()
    tokens = np.arange(len(logs))[None, None]
    engine = HeadsEstimate([known]).estimate(["a"], tokens, logs[None, None])[0, 0]
    scaled = -np.logaddexp(0, -(known.bias + known.scale * odds))
    # float32 has log 0.999999 to a few per cent; scaled by 0.7 that is 1e-5 at most.
    np.testing.assert_allclose(np.exp(scaled), np.exp(engine), rtol=1e-5, atol=1e-5)


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


def test_what_a_tree_must_hold_multiplies_along_the_path() -> None:
    # Second candidates of the first two heads: a tree with that path has 4 nodes at depth 2.
    deep = answer([5, 6, 7, 8], [[[0, 6], [0, 7], [8, 0]]] * 4)
    assert judge([deep], 4).reached[0].tolist() == [True, True, True]
    assert judge([deep], 3).reached[0].tolist() == [True, True, False]
    missed = answer([5, 6, 7, 8], [[[0, 1], [7, 0], [8, 0]]] * 4)
    assert judge([missed], 50).reached[0].tolist() == [True, False, False]
    assert accuracies(judge([missed], 50)).tolist() == [[0, 0]] * 3, "right, but out of turn"


def test_no_answer_runs_into_the_next() -> None:
    both = judge([SMALL, answer([6, 7], [[[7, 6], [7, 6]]] * 2)], 4)
    assert both.hits.any(2)[2:].tolist() == [[False, False], [True, False], [False, False]]
    assert both.reached[2:].tolist() == [[False, False], [True, False], [False, False]]
    assert accuracies(both).tolist() == [[2 / 3, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_answers_cannot_be_split(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} answers: calibration needs at least 2"):
        split([SMALL] * count)


def test_every_fourth_answer_is_held_out() -> None:
    fit, held_out = split([SMALL] * 9)
    assert (len(fit), len(held_out)) == (6, 3)
