"""Examples for heads: a hidden state, the token chosen from it, and the tokens that followed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from medusa_plugin.training.hidden_states import Shard

MIXED_SHARDS = 4
"""Shards in memory at a time; their examples are shuffled among each other."""
NO_TOKEN = -1
"""Where an answer has ended."""


@dataclass(frozen=True)
class Batch:
    """Examples of some positions."""

    hidden: torch.Tensor
    """bf16 `[batch, hidden_size]`."""
    roots: torch.Tensor
    """int64 `[batch]`, the tokens chosen from `hidden`."""
    futures: torch.Tensor
    """int64 `[batch, num_heads]` the tokens after them, which the heads should propose;
    `NO_TOKEN` past the end of an answer."""
    later: torch.Tensor | None = None
    """bf16 `[batch, num_heads, hidden_size]` the states from which `futures` were chosen, for
    distillation; of any value past the end."""

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        later = None if self.later is None else self.later.to(device)
        return Batch(self.hidden.to(device), self.roots.to(device), self.futures.to(device), later)

    def part(self, rank: int, world: int) -> Batch:
        """The share of process `rank` of `world`."""
        later = None if self.later is None else self.later[rank::world]
        return Batch(
            self.hidden[rank::world], self.roots[rank::world], self.futures[rank::world], later
        )


class Rows:
    """Some shards in memory."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        read = [shard.read() for shard in shards]
        self.hidden = torch.cat([hidden for hidden, _ in read])
        self.tokens = torch.cat([tokens for _, tokens in read])
        self.lengths = torch.cat([shard.lengths for shard in shards])
        self.ends = self.lengths.cumsum(0).repeat_interleave(self.lengths)

    def usable(self) -> torch.Tensor:
        """int64, ascending: rows whose answer goes on."""
        return torch.nonzero(torch.arange(len(self.ends)) + 1 < self.ends)[:, 0]

    def batch(self, rows: torch.Tensor, num_heads: int, *, later: bool = False) -> Batch:
        """The examples of `rows`, int64 `[batch]`."""
        places = rows[:, None] + 1 + torch.arange(num_heads)
        known = places < self.ends[rows, None]
        places = places.clamp(max=len(self.tokens) - 1)
        futures = torch.where(known, self.tokens[places], NO_TOKEN)
        return Batch(
            self.hidden[rows], self.tokens[rows], futures, self.hidden[places] if later else None
        )


class Examples:
    """All examples of some shards, in an order that depends on the seed and the epoch alone.

    Args:
        shards: at least one.
        num_heads: futures of an example.
        batch_size: examples of a batch; the last of some shards' batches may be smaller.
        seed: of the order.
        later: whether batches have `later`.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        num_heads: int,
        batch_size: int,
        seed: int,
        *,
        later: bool = False,
    ) -> None:
        self._shards = list(shards)
        self._num_heads = num_heads
        self._batch_size = batch_size
        self._seed = seed
        self._later = later

    def __len__(self) -> int:
        return sum(_usable(shard) for shard in self._shards)

    @property
    def fingerprint(self) -> str:
        """Of the examples and their order."""
        shapes = [(shard.path.name, shard.lengths.tolist()) for shard in self._shards]
        told = (shapes, self._num_heads, self._batch_size, self._seed, self._later)
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def num_batches(self, epoch: int) -> int:
        """Of an epoch."""
        return sum(self._count(group) for group in self._groups(epoch))

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `first` on.

        At most `MIXED_SHARDS` shards are in memory.
        """
        for number, group in enumerate(self._groups(epoch)):
            count = self._count(group)
            if first >= count:
                first -= count
                continue
            rows = Rows(group)
            usable = rows.usable()
            order = usable[torch.randperm(len(usable), generator=self._generator(epoch, number))]
            for start in range(first * self._batch_size, len(order), self._batch_size):
                chosen = order[start : start + self._batch_size]
                yield rows.batch(chosen, self._num_heads, later=self._later)
            first = 0

    def _groups(self, epoch: int) -> list[list[Shard]]:
        order = torch.randperm(len(self._shards), generator=self._generator(epoch, -1)).tolist()
        return [
            [self._shards[i] for i in order[first : first + MIXED_SHARDS]]
            for first in range(0, len(order), MIXED_SHARDS)
        ]

    def _count(self, group: Sequence[Shard]) -> int:
        return -(-sum(_usable(shard) for shard in group) // self._batch_size)

    def _generator(self, epoch: int, group: int) -> torch.Generator:
        return torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) * 10_007 + group + 1)


def _usable(shard: Shard) -> int:
    return shard.rows - len(shard.lengths)


def sample(
    shards: Sequence[Shard], num_heads: int, most: int, seed: int, *, later: bool = False
) -> list[Batch]:
    """About `most` examples of `shards`, the same for the same arguments; all in memory."""
    batches, taken = [], 0
    for batch in Examples(shards, num_heads, 1024, seed, later=later).batches(0):
        batches.append(batch)
        taken += len(batch.roots)
        if taken >= most:
            break
    return batches


def rank_tokens(shards: Sequence[Shard], vocab_size: int) -> torch.Tensor:
    """int64 `[vocab_size]` all token ids, those most frequent in the answers first; ties by id."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for shard in shards:
        counts += torch.bincount(shard.read()[1], minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)


@dataclass(frozen=True)
class InputStatistics:
    """Of the hidden states that heads read."""

    mean: torch.Tensor
    """float32 `[hidden_size]`."""
    std: torch.Tensor
    """float32 `[hidden_size]`."""


def measure_inputs(shards: Sequence[Shard], most_shards: int = 16) -> InputStatistics:
    """Mean and standard deviation of each channel, over the first `most_shards` shards."""
    total = square = torch.zeros(())
    rows = 0
    for shard in shards[:most_shards]:
        hidden = shard.read()[0].double()
        total = total + hidden.sum(0)
        square = square + hidden.square().sum(0)
        rows += len(hidden)
    mean = total / rows
    variance = (square / rows - mean.square()).clamp(min=1e-12)
    return InputStatistics(mean.float(), variance.sqrt().float())
