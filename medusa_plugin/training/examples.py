"""What heads learn from: a hidden state, the token chosen from it, and the tokens that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from medusa_plugin.training.hidden_states import open_shard

_CHUNK = 1 << 14


@dataclass(frozen=True)
class Batch:
    """Positions of answers, in no order."""

    hidden: torch.Tensor
    """bfloat16 `[batch, hidden_size]`."""
    roots: torch.Tensor
    """int64 `[batch]`, the tokens that the target chose from `hidden`."""
    futures: torch.Tensor
    """int64 `[num_heads, batch]`, what each head should propose; any token past the end."""
    known: torch.Tensor
    """bool `[num_heads, batch]`: the answer has not ended before."""
    rows: torch.Tensor
    """int64 `[batch]`, ascending, among all examples."""


class Examples:
    """All rows of some shards.

    Args:
        files: of the shards, at least one.

    Raises:
        HiddenStatesError: a file is damaged.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        shards = [open_shard(file) for file in files]
        self._hidden = [shard.hidden for shard in shards]
        self._tokens = torch.cat([shard.tokens for shard in shards]).long()
        self._left = torch.cat([shard.left for shard in shards])
        held_out = torch.cat([shard.held_out for shard in shards])
        sizes = torch.tensor([len(hidden) for hidden in self._hidden])
        self._ends = sizes.cumsum(0)
        usable = self._left > 0
        self.train = (usable & ~held_out).nonzero().squeeze(1)
        """int64, rows to train on: those after which at least one token comes."""
        self.held_out = (usable & held_out).nonzero().squeeze(1)
        """int64, rows to judge by."""
        self._train_tokens = self._tokens[~held_out]
        self._train_rows = (~held_out).nonzero().squeeze(1)

    def batch(self, rows: torch.Tensor, num_heads: int) -> Batch:
        """The examples at `rows`.

        Args:
            rows: int64 `[batch]`, any order.
            num_heads: tokens to look ahead.
        """
        rows = rows.sort().values
        ahead = rows + 1 + torch.arange(num_heads)[:, None]
        known = self._left[rows] > torch.arange(num_heads)[:, None]
        futures = self._tokens[ahead.clamp_max(len(self._tokens) - 1)]
        return Batch(self.hidden(rows), self._tokens[rows], futures, known, rows)

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """bfloat16 `[n, hidden_size]` of ascending `rows`."""
        ends = torch.searchsorted(rows, self._ends).tolist()
        parts, begin, start = [], 0, 0
        for hidden, end in zip(self._hidden, ends, strict=True):
            if end > begin:
                parts.append(hidden[rows[begin:end] - start])
            begin, start = end, start + len(hidden)
        return torch.cat(parts)

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation per channel of the training rows, float32."""
        size = self._hidden[0].shape[1]
        total, square = torch.zeros(2, size, dtype=torch.float64)
        for rows in self._train_rows.split(_CHUNK):
            hidden = self.hidden(rows).double()
            total += hidden.sum(0)
            square += hidden.square().sum(0)
        mean = total / len(self._train_rows)
        variance = square / len(self._train_rows) - mean.square()
        return mean.float(), variance.clamp_min(1e-12).sqrt().float()

    def rank_tokens(self, vocab_size: int) -> torch.Tensor:
        """int64 `[vocab_size]`: all ids, the most frequent in training answers first."""
        counts = torch.bincount(self._train_tokens, minlength=vocab_size)
        return counts.sort(descending=True, stable=True).indices
