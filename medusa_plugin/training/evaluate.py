"""What trained heads are worth: tokens per step on held-out answers, verified as an engine would.

An answer is followed from its beginning: a tree is grown at its token, as far as a path of the tree
is the answer's own continuation it is accepted, and the next tree grows after that and the token
that the target adds. With greedy answers that is what an engine would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from medusa_plugin.growth import propose_along
from medusa_plugin.heads.base import DraftHeads
from medusa_plugin.training.calibrate import (
    HeadFit,
    accuracies,
    fit_heads,
    judge,
    split,
)
from medusa_plugin.training.examples import Rows
from medusa_plugin.training.hidden_states import Shard
from medusa_plugin.training.record import Answer
from medusa_plugin.training.tree_sizes import Yield, tokens_per_step

NUM_NODES = 31
"""Of the largest tree: 32 rows with its root."""
MOST_ANSWERS = 120
_RANKS = 32


@dataclass(frozen=True)
class HeldOut:
    """What heads reach on held-out answers."""

    fits: list[HeadFit]
    """Calibration of each head."""
    accuracies: npt.NDArray[np.float64]
    """`[num_heads, k]` of each head and rank, where the path before may be in a tree."""
    yields: Yield
    """Of trees of each size up to `NUM_NODES`, on answers that did not calibrate them."""
    answers: int
    """Calibrating and judging."""
    tokens: int
    """Of the answers."""


def held_out_answers(
    heads: DraftHeads, shards: Sequence[Shard], dtype: torch.dtype, most: int = MOST_ANSWERS
) -> list[Answer]:
    """What the heads propose along the first answers of some shards.

    Args:
        heads: on the CPU.
        shards: of held-out texts.
        dtype: of the heads.
        most: answers; those with no more tokens than heads are left out.
    """
    answers: list[Answer] = []
    top_k = min(_RANKS, heads.max_top_k)
    for shard in shards:
        rows = Rows([shard])
        ends = rows.lengths.cumsum(0).tolist()
        for end, length in zip(ends, rows.lengths.tolist(), strict=True):
            if len(answers) == most:
                return answers
            if length <= heads.num_heads:
                continue
            hidden = rows.hidden[end - length : end].to(dtype)
            tokens = rows.tokens[end - length : end]
            candidates, log_probs = propose_along(heads, hidden, tokens, top_k)
            answers.append(Answer(tokens.numpy(), candidates, log_probs, hidden))
    return answers


@torch.no_grad()
def evaluate_held_out(
    heads: DraftHeads,
    shards: Sequence[Shard],
    dtype: torch.dtype,
    *,
    num_nodes: int = NUM_NODES,
    most: int = MOST_ANSWERS,
) -> HeldOut:
    """Calibrate heads on three of four held-out answers, and decode the others with trees.

    Args:
        heads: of any kind, on the CPU.
        shards: of held-out texts.
        dtype: of the heads.
        num_nodes: the largest tree.
        most: answers.

    Raises:
        ValueError: there are fewer than two answers of use.
    """
    answers = held_out_answers(heads, shards, dtype, most)
    fitting, judging = split(answers)
    fits = fit_heads(judge(fitting, num_nodes), judge(judging, num_nodes), num_nodes)
    yields = tokens_per_step(judging, heads, [fit.calibration for fit in fits], num_nodes)
    return HeldOut(
        fits,
        accuracies(judge(answers, num_nodes)),
        yields,
        len(answers),
        sum(len(answer.tokens) for answer in answers),
    )
