"""Calibration of heads: how likely their candidates really are, where the path before is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from medusa_plugin.heads.tuning import HeadScaling, HeadsTuning, MeasuredOn, fingerprint
from medusa_plugin.training.record import Answer
from medusa_plugin.tree.dynamic import FloatArray, Int64Array
from medusa_plugin.tree.estimate import HeadCalibration

BoolArray = npt.NDArray[np.bool_]

HELD_OUT_EVERY = 4
"""Every fourth answer is held out."""
_BINS = 15
_BIAS_SPREAD, _SCALE_SPREAD = 3.0, 1.0
"""Of a normal prior around the identity, so that few or one-sided judgements stay finite."""


@dataclass(frozen=True)
class Judgements:
    """Candidates at n tokens, and whether they were right."""

    log_probs: FloatArray
    """`[n, num_heads, k]` by the heads."""
    hits: BoolArray
    """`[n, num_heads, k]`."""
    reached: BoolArray
    """`[n, num_heads]` whether the head's turn came: the tokens before are a path that a tree may
    hold, and the answer goes on."""


def judge(answers: Sequence[Answer], num_nodes: int) -> Judgements:
    """Judge every candidate by the answer's own continuation.

    A node of ranks r, s, ... (from 0) is no more probable than any node of smaller ranks, so a
    tree that holds it has at least (r + 1)(s + 1)... nodes of its depth: where that is more than
    `num_nodes`, the head after it never gets its turn.

    Args:
        answers: at least one, of the same heads and k.
        num_nodes: most nodes of a tree.
    """
    hits = np.concatenate([answer.candidates == futures(answer)[:, :, None] for answer in answers])
    known = np.concatenate([futures(answer) >= 0 for answer in answers])
    found = hits.any(2)
    ranks = np.where(found, hits.argmax(2) + 1, num_nodes + 1)
    before = np.cumprod(np.minimum(ranks, num_nodes + 1).astype(np.float64), axis=1)
    reached = known.copy()
    reached[:, 1:] &= before[:, :-1] <= num_nodes
    return Judgements(np.concatenate([answer.log_probs for answer in answers]), hits, reached)


def futures(answer: Answer) -> Int64Array:
    """`[n, num_heads]` the token that head h should propose after token i; -1 past the end."""
    n, num_heads, _ = answer.candidates.shape
    padded = np.concatenate([answer.tokens, np.full(num_heads, -1, np.int64)])
    result: Int64Array = padded[np.arange(n)[:, None] + 1 + np.arange(num_heads)]
    return result


def accuracies(judgements: Judgements) -> npt.NDArray[np.float64]:
    """`[num_heads, k]` how often each candidate is right when its head's turn comes."""
    reached = judgements.reached[:, :, None]
    counts = np.maximum(reached.sum(0), 1)
    result: npt.NDArray[np.float64] = (judgements.hits & reached).sum(0) / counts
    return result


@dataclass(frozen=True)
class HeadFit:
    """The calibration of one head and what it is worth on held-out answers."""

    calibration: HeadCalibration
    """The identity where the fit is no better."""
    fitted: HeadCalibration
    judged: int
    """Times the head's turn came in the answers for fitting."""
    held_out: int
    """The same in the held-out ones."""
    log_loss: tuple[float, float]
    """Of a held-out candidate, in nats, before and after."""
    error: tuple[float, float]
    """Expected calibration error on the held-out candidates, before and after."""


def split(answers: Sequence[Answer]) -> tuple[list[Answer], list[Answer]]:
    """Answers to fit on, and held-out ones.

    Raises:
        ValueError: there are fewer than two.
    """
    if len(answers) < 2:
        raise ValueError(
            f"{len(answers)} answers: calibration needs at least 2, one to fit on and one held out"
        )
    fit = [answer for i, answer in enumerate(answers) if i % HELD_OUT_EVERY]
    return fit, list(answers[::HELD_OUT_EVERY])


def fit_heads(fit: Judgements, held_out: Judgements, num_candidates: int) -> list[HeadFit]:
    """Fit each head, and keep the identity where held-out log loss does not improve.

    Args:
        fit: what to fit on.
        held_out: what decides.
        num_candidates: of each head that count, best first: those which the drafter asks for.
    """
    fits = []
    for head in range(fit.hits.shape[1]):
        odds, hits = _candidates(fit, head, num_candidates)
        test_odds, test_hits = _candidates(held_out, head, num_candidates)
        identity, fitted = HeadCalibration(), fit_scaling(odds, hits)
        before, after = (
            _log_loss(test_odds, test_hits, calibration) for calibration in (identity, fitted)
        )
        fits.append(
            HeadFit(
                calibration=fitted if after < before else identity,
                fitted=fitted,
                judged=int(fit.reached[:, head].sum()),
                held_out=int(held_out.reached[:, head].sum()),
                log_loss=(before, after),
                error=(
                    _calibration_error(_probs(test_odds, identity), test_hits),
                    _calibration_error(_probs(test_odds, fitted), test_hits),
                ),
            )
        )
    return fits


def tuning_of(
    fits: Sequence[HeadFit],
    table: npt.NDArray[np.float64],
    weights: Path,
    draft_vocab_size: int,
    measured_on: MeasuredOn,
) -> HeadsTuning:
    """What was learnt about heads, in the form of their tuning file.

    Args:
        fits: of the heads.
        table: `[num_heads, k]`, see `accuracies`.
        weights: the heads' file.
        draft_vocab_size: of the candidates that were judged.
        measured_on: where it comes from.
    """
    return HeadsTuning(
        fingerprint=fingerprint(weights),
        draft_vocab_size=draft_vocab_size,
        calibration=tuple(
            HeadScaling(
                bias=round(fit.calibration.bias, 4),
                scale=float(f"{fit.calibration.scale:.5g}"),  # never 0, which no engine would read
            )
            for fit in fits
        ),
        accuracies=tuple(tuple(round(share, 4) for share in row) for row in table.tolist()),
        measured_on=measured_on,
    )


def fit_scaling(odds: npt.NDArray[np.float64], hits: BoolArray) -> HeadCalibration:
    """Logistic regression of hits on log-odds, its slope kept above 0.

    Args:
        odds: `[n]` logit of the probabilities.
        hits: `[n]`.
    """
    if not len(odds):
        return HeadCalibration()
    x, y = torch.from_numpy(odds), torch.from_numpy(hits).double()
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    log_scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([bias, log_scale], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(
            bias + log_scale.exp() * x, y, reduction="sum"
        )
        value = value + 0.5 * ((bias / _BIAS_SPREAD) ** 2 + (log_scale / _SCALE_SPREAD) ** 2)
        value = value / len(x)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    return HeadCalibration(float(bias.detach()), float(log_scale.detach().exp()))


def log_odds(log_probs: FloatArray) -> npt.NDArray[np.float64]:
    """logit(p) of log p; finite, as `HeadsEstimate` has it."""
    logs = np.maximum(log_probs.astype(np.float64), -1e3)
    result: npt.NDArray[np.float64] = logs - np.log1p(-np.exp(np.minimum(logs, -1e-6)))
    return result


def _candidates(
    judgements: Judgements, head: int, count: int
) -> tuple[npt.NDArray[np.float64], BoolArray]:
    """Log-odds and hits of the `count` best candidates of a head when its turn came."""
    reached = judgements.reached[:, head]
    odds = log_odds(judgements.log_probs[reached, head, :count])
    return odds.ravel(), judgements.hits[reached, head, :count].ravel()


def _probs(odds: npt.NDArray[np.float64], calibration: HeadCalibration) -> npt.NDArray[np.float64]:
    scaled = calibration.bias + calibration.scale * odds
    result: npt.NDArray[np.float64] = np.exp(-np.logaddexp(0, -scaled))
    return result


def _log_loss(
    odds: npt.NDArray[np.float64], hits: BoolArray, calibration: HeadCalibration
) -> float:
    if not len(odds):
        return 0.0
    scaled = calibration.bias + calibration.scale * odds
    return float(np.logaddexp(0, np.where(hits, -scaled, scaled)).mean())


def _calibration_error(probs: npt.NDArray[np.float64], hits: BoolArray) -> float:
    """Mean distance between claimed and found frequency over bins of equally many candidates."""
    if not len(probs):
        return 0.0
    order = np.argsort(probs, kind="stable")
    bins = [b for b in np.array_split(order, _BINS) if len(b)]
    distances = [abs(probs[b].mean() - hits[b].mean()) * len(b) for b in bins]
    return float(sum(distances) / len(probs))
