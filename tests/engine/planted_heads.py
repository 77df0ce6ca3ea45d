"""Heads that know the future, for the real drafter to rank, size and keep book of."""

from __future__ import annotations

import random

import torch

from medusa_plugin.heads.base import Candidates, ParallelHeads
from tests.engine.conftest import VOCAB_SIZE


class PlantedHeads(ParallelHeads):
    """Four heads; for each request the right token has a random rank, or is not there."""

    num_heads = 4
    max_top_k = VOCAB_SIZE

    def __init__(self, hit_rate: float, seed: int = 3) -> None:
        self.hit_rate = hit_rate
        self.futures: list[list[int]] = []
        """Of the requests of the next call."""
        self.calls = 0
        self._random = random.Random(seed)

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
