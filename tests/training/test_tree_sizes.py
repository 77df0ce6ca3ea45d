"""What trees of each size yield, against a loop that drafts and walks one tree at a time."""

from __future__ import annotations

import numpy as np
import pytest

from medusa_plugin.training.record import Answer
from medusa_plugin.training.tree_sizes import rates, tokens_per_step
from medusa_plugin.tree.budget import CostCurve, StepCosts
from medusa_plugin.tree.dynamic import independent, rank_nodes
from medusa_plugin.tree.estimate import HeadCalibration, HeadsEstimate

NUM_HEADS, RANKS, NUM_NODES = 3, 5, 6
CALIBRATION = [HeadCalibration(-0.2, 0.9)] * NUM_HEADS


def random_answer(length: int, seed: int) -> Answer:
    """Six tokens to choose from: candidates are right often enough to go deep."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 6, length)
    candidates = np.stack(
        [np.stack([rng.permutation(6)[:RANKS] for _ in range(NUM_HEADS)]) for _ in range(length)]
    )
    logs = np.log(-np.sort(-rng.dirichlet(np.ones(6), (length, NUM_HEADS)))[:, :, :RANKS])
    return Answer(tokens, candidates, logs.astype(np.float32))


def walked(answer: Answer, size: int) -> tuple[int, int]:
    """Tokens and steps of decoding the answer again with trees of `size` nodes."""
    position = steps = gained = 0
    while position + NUM_HEADS < len(answer.tokens):
        here = slice(position, position + 1)
        logs = HeadsEstimate(CALIBRATION).estimate(
            ["a"], answer.candidates[here], answer.log_probs[here]
        )
        expand = independent(answer.candidates[here], logs)
        ranked = rank_nodes(expand, (1, NUM_HEADS), NUM_NODES)
        row, depth = 0, 0
        while True:
            wanted = answer.tokens[position + depth + 1]
            children = [
                node + 1
                for node in range(size)
                if ranked.parents[0, node] == row and ranked.tokens[0, node] == wanted
            ]
            if not children:
                break
            row, depth = children[0], depth + 1
        steps, gained, position = steps + 1, gained + 1 + depth, position + 1 + depth
    return gained, steps


def test_answers_are_decoded_again_with_each_size() -> None:
    # Of several answers the long one counts more, and one without a step for nothing.
    answers = [random_answer(60, 1), random_answer(15, 3), random_answer(NUM_HEADS, 4)]
    found = tokens_per_step(answers, None, CALIBRATION, NUM_NODES)
    counts = [[walked(a, size) for a in answers] for size in range(NUM_NODES + 1)]
    expected = [sum(t for t, _ in each) / sum(s for _, s in each) for each in counts]
    assert found.simulated.tolist() == pytest.approx(expected)
    assert expected[0] == 1 and max(expected) > 1.3
    assert found.expected[0] == 1 and (np.diff(found.expected) > 0).all()


def test_impossible_candidates_are_no_nodes() -> None:
    answer = random_answer(40, 1)
    answer.log_probs[:, :, 1:] = -np.inf
    found = tokens_per_step([answer], None, CALIBRATION, NUM_NODES)
    best = tokens_per_step(
        [Answer(answer.tokens, answer.candidates[:, :, :1], answer.log_probs[:, :, :1])],
        None,
        CALIBRATION,
        NUM_NODES,
    )
    # Only the chain of best candidates is left: trees end at its length.
    assert found.simulated.tolist() == best.simulated.tolist()
    assert found.expected == pytest.approx(best.expected)


def test_answers_too_short_for_the_heads_count_for_nothing() -> None:
    found = tokens_per_step([random_answer(NUM_HEADS, 2)], None, CALIBRATION, 2)
    assert found.simulated.tolist() == [0, 0, 0]


def test_rates_are_tokens_over_the_step() -> None:
    curve = CostCurve((1, 10, 20), (1.0, 1.0, 2.0))
    costs = StepCosts(curve, CostCurve((1, 4), (0.5, 1.5)), per_request=0.25, per_node=0.125)
    found = rates(np.array([1.0, 1.5, 1.8]), costs, 4)
    assert found.tolist() == pytest.approx(
        [4 / (1 + 1), 6 / (1 + 1 + 0.5 + 1.5), 7.2 / (1.2 + 1 + 1 + 1.5)]
    )
