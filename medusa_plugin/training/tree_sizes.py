"""What trees of each size yield: expected by the estimate, and simulated on known answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from medusa_plugin.growth import Growth
from medusa_plugin.heads.base import DraftHeads, SequentialHeads
from medusa_plugin.training.calibrate import futures
from medusa_plugin.training.record import Answer
from medusa_plugin.tree.budget import StepCosts
from medusa_plugin.tree.dynamic import RankedNodes, independent, rank_nodes
from medusa_plugin.tree.estimate import HeadCalibration, HeadsEstimate

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Yield:
    """Tokens per step by the size of the tree, the target's own token included."""

    expected: Floats
    """`[num_nodes + 1]` by the calibrated probabilities, where a tree of that size would stand."""
    simulated: Floats
    """`[num_nodes + 1]` by following the answers."""


def tokens_per_step(
    answers: Sequence[Answer],
    heads: DraftHeads | None,
    calibration: Sequence[HeadCalibration],
    num_nodes: int,
) -> Yield:
    """Decode the answers again with dynamic trees of each size from 0 to `num_nodes`.

    Args:
        answers: greedy ones; those with no more tokens than heads count for nothing.
        heads: that gave the candidates; needed where they read the path, and then the answers'
            hidden states are too.
        calibration: one per head.
        num_nodes: the largest size.
    """
    expected, gained = np.zeros(num_nodes + 1), np.zeros(num_nodes + 1)
    steps = np.zeros(num_nodes + 1)
    for answer in answers:
        n, num_heads, _ = answer.candidates.shape
        if n <= num_heads:
            continue
        ranked = _rank(answer, heads, calibration, num_nodes)
        probs, accepted = _follow(answer, ranked, num_nodes)
        for size in range(num_nodes + 1):
            position = 0
            while position + num_heads < n:  # beyond, the heads' future is unknown
                expected[size] += 1 + probs[position, size]
                gained[size] += 1 + accepted[position, size]
                steps[size] += 1
                position += 1 + int(accepted[position, size])
    steps = np.maximum(steps, 1)
    return Yield(expected / steps, gained / steps)


def _rank(
    answer: Answer,
    heads: DraftHeads | None,
    calibration: Sequence[HeadCalibration],
    num_nodes: int,
) -> RankedNodes:
    """The trees of all the answer's tokens, as a batch."""
    n, num_heads, k = answer.candidates.shape
    ids = [str(i) for i in range(n)]
    estimate, k = HeadsEstimate(calibration), min(k, num_nodes)
    if isinstance(heads, SequentialHeads):
        assert answer.hidden is not None
        roots = torch.from_numpy(answer.tokens).to(answer.hidden.device)
        growth = Growth(heads, answer.hidden, roots, k, estimate, ids)
        return rank_nodes(growth.widest(num_nodes), (n, num_heads), num_nodes)
    tokens = answer.candidates[:, :, :k]
    logs = estimate.estimate(ids, tokens, answer.log_probs[:, :, :k])
    return rank_nodes(independent(tokens, logs), (n, num_heads), num_nodes)


def _follow(answer: Answer, ranked: RankedNodes, num_nodes: int) -> tuple[Floats, Floats]:
    """`[n, num_nodes + 1]` expected and truly accepted nodes of the tree at each token."""
    n = len(answer.tokens)
    truth, rows = futures(answer), np.arange(n)
    count = ranked.tokens.shape[1]
    right = np.ones((n, count + 1), bool)
    depths = np.zeros((n, count + 1), np.int64)
    for node in range(count):
        parent = ranked.parents[:, node]
        depths[:, node + 1] = depths[rows, parent] + 1
        right[:, node + 1] = right[rows, parent] & (
            ranked.tokens[:, node] == truth[rows, depths[rows, parent]]
        )
    right &= np.concatenate([np.ones((n, 1), bool), np.isfinite(ranked.log_probs)], 1)
    probs, accepted = np.zeros((n, num_nodes + 1)), np.zeros((n, num_nodes + 1))
    probs[:, 1 : count + 1] = np.exp(ranked.log_probs)
    accepted[:, 1 : count + 1] = right[:, 1:]
    return probs.cumsum(1), accepted.cumsum(1)


def rates(tokens: Floats, costs: StepCosts, batch: int) -> Floats:
    """`[num_nodes + 1]` tokens per second of `batch` requests whose trees all have one size.

    Args:
        tokens: `[num_nodes + 1]` per request and step.
        costs: of a step.
        batch: requests.
    """
    sizes = np.arange(len(tokens), dtype=np.float64)
    seconds = costs.step(batch, batch * sizes)
    seconds[1:] += costs.draft_seconds(batch)
    result: Floats = batch * tokens / seconds
    return result
