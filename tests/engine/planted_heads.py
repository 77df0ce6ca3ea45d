"""Heads that know the future, for the real drafter to rank, size and keep book of."""

from __future__ import annotations

import random

import torch

from medusa_plugin.heads.base import Candidates, DraftHeads, ParallelHeads, SequentialHeads
from tests.engine.conftest import VOCAB_SIZE


class Planted(DraftHeads):
    """What both kinds know, and how they err."""

    num_heads = 4
    max_top_k = VOCAB_SIZE

    def __init__(self, hit_rate: float, seed: int = 3) -> None:
        self.hit_rate = hit_rate
        self.futures: list[list[int]] = []
        """Of the requests of the next call."""
        self.calls = 0
        self._random = random.Random(seed)


class PlantedHeads(Planted, ParallelHeads):
    """Four heads; for each request the right token has a random rank, or is not there."""

    def propose(self, hidden: torch.Tensor, token_ids: torch.Tensor, top_k: int) -> Candidates:
        self.calls += 1
        scores = torch.full((len(self.futures), self.num_heads, VOCAB_SIZE), -5.0)
        scores += torch.rand(scores.shape, generator=torch.Generator().manual_seed(5))
        for i, future in enumerate(self.futures):
            for head in range(self.num_heads):
                right = future[head] if head < len(future) else None
                if right is None:
                    continue
                if self._random.random() < self.hit_rate:
                    scores[i, head, right] = self._random.choice([-3.9, 3.0])
                else:
                    scores[i, head, right] = -50.0
        best, ids = scores.topk(top_k)
        return Candidates(ids, best, scores)


class PlantedBranches(Planted, SequentialHeads):
    """The same, read along branches: nodes off the right path get nothing but noise.

    A state is the request's place in the batch, and how many tokens of its future the node has
    behind it; -1 off the path.
    """

    draft_vocab = None

    def begin(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        places = torch.arange(len(hidden))
        return torch.stack([places, torch.zeros_like(places)], 1)

    def advance(self, head: int, state: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        state = state.clone()
        for row, token in zip(state, token_ids.tolist(), strict=True):
            future = self.futures[row[0]]
            behind = int(row[1])
            assert behind in (-1, head - 1), "not the state of a node's parent"
            right = behind >= 0 and behind < len(future) and future[behind] == token
            row[1] = head if right else -1
        return state

    def logits(self, head: int, state: torch.Tensor) -> torch.Tensor:
        scores = torch.full((len(state), VOCAB_SIZE), -5.0)
        scores += torch.rand(scores.shape, generator=torch.Generator().manual_seed(5))
        for row, (place, behind) in zip(scores, state.tolist(), strict=True):
            future = self.futures[place]
            if behind < 0 or behind >= len(future):
                continue
            hit = self._random.random() < self.hit_rate
            row[future[behind]] = self._random.choice([-3.9, 3.0]) if hit else -50.0
        return scores
