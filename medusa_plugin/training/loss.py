"""What heads are trained for: the tokens that the target's answer goes on with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from medusa_plugin.heads.base import SequentialHeads
from medusa_plugin.training.examples import NO_TOKEN, Batch


class AllLogits(Protocol):
    """Heads that do not read the tokens of a branch."""

    num_heads: int

    def all_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 `[num_heads, batch, draft vocabulary]`."""


TrainableHeads = SequentialHeads | AllLogits


def head_logits(heads: TrainableHeads, batch: Batch) -> Iterator[torch.Tensor]:
    """float32 `[batch, draft vocabulary]` of each head, where all tokens before are the true ones.

    Past the end of an answer they are of no meaning.
    """
    if not isinstance(heads, SequentialHeads):
        yield from heads.all_logits(batch.hidden, batch.roots)
        return
    futures = batch.futures.clamp(min=0)
    state = heads.begin(batch.hidden, batch.roots)
    yield heads.logits(0, state)
    for head in range(1, heads.num_heads):
        state = heads.advance(head, state, futures[:, head - 1])
        yield heads.logits(head, state)


def columns_of(draft_vocab: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int64 `[vocab_size + 1]` the column of each token; `NO_TOKEN` for others, and at the end.

    The last entry serves `NO_TOKEN` itself as an index.
    """
    columns = torch.full((vocab_size + 1,), NO_TOKEN, dtype=torch.int64, device=draft_vocab.device)
    columns[draft_vocab] = torch.arange(len(draft_vocab), device=draft_vocab.device)
    return columns


@dataclass(frozen=True)
class Objective:
    """The loss of a batch.

    Per head the mean over the examples whose token is in the draft vocabulary; over the heads the
    mean with weights `decay ** head`.
    """

    columns: torch.Tensor
    """See `columns_of`."""
    decay: float = 0.9
    distill: float = 0.0
    """Share of the divergence from the target's own distribution, the rest being cross entropy
    with its token."""
    lm_head: torch.Tensor | None = None
    """`[draft vocabulary, hidden_size]` of the target, for distillation."""

    def weights(self, num_heads: int) -> torch.Tensor:
        """float32 `[num_heads]`, of sum 1."""
        weights = self.decay ** torch.arange(num_heads, dtype=torch.float32)
        return weights / weights.sum()

    def labels(self, batch: Batch) -> torch.Tensor:
        """int64 `[batch, num_heads]` columns of the true tokens; `NO_TOKEN` where none counts."""
        return self.columns[batch.futures]

    def sums(self, heads: TrainableHeads, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 `[num_heads]` the summed loss of each head, and int64 how many examples."""
        labels = self.labels(batch)
        sums = [
            self._head_sum(logits, labels[:, head], batch, head)
            for head, logits in enumerate(head_logits(heads, batch))
        ]
        return torch.stack(sums), (labels >= 0).sum(0)

    def _head_sum(
        self, logits: torch.Tensor, labels: torch.Tensor, batch: Batch, head: int
    ) -> torch.Tensor:
        loss = F.cross_entropy(logits, labels, ignore_index=NO_TOKEN, reduction="sum")
        if not self.distill:
            return loss
        assert batch.later is not None and self.lm_head is not None
        kept = labels >= 0
        with torch.no_grad():
            wanted = F.linear(batch.later[kept, head].to(self.lm_head.dtype), self.lm_head)
            wanted = F.log_softmax(wanted.float(), -1)
        divergence = F.kl_div(
            F.log_softmax(logits[kept], -1), wanted, reduction="sum", log_target=True
        )
        return (1 - self.distill) * loss + self.distill * divergence
