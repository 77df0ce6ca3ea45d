"""What every kind of draft heads offers, and what it must know of its target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch


class HeadsError(ValueError):
    """The heads cannot be read or do not fit the target; the message names the file."""


@dataclass(frozen=True)
class TargetSpec:
    """The target model, as far as its heads depend on it."""

    hidden_size: int
    vocab_size: int
    lm_head: torch.Tensor
    """Output embedding `[rows, hidden_size]`; rows from `vocab_size` on are padding."""
    dtype: torch.dtype
    """Of the hidden states; the heads compute in it. float32, bfloat16 or float16."""
    device: torch.device
    embedding: torch.Tensor | None = None
    """Input embedding `[rows, hidden_size]`, for heads that read tokens; None where unknown."""


@dataclass(frozen=True)
class Candidates:
    """The most likely tokens of each head, best first."""

    token_ids: torch.Tensor
    """int64 `[batch, num_heads, k]`, target vocabulary, distinct within a head."""
    logits: torch.Tensor
    """float32 `[batch, num_heads, k]` of these tokens."""
    all_logits: torch.Tensor
    """float32 `[batch, num_heads, draft vocabulary]`."""

    @cached_property
    def log_probs(self) -> torch.Tensor:
        """float32 `[batch, num_heads, k]`, natural logarithm, normalised over the draft vocabulary.

        Computed when asked for: a static tree never does, and it costs as much as a block.
        """
        return self.logits - self.all_logits.logsumexp(dim=-1, keepdim=True)

    @classmethod
    def best(cls, logits: torch.Tensor, draft_vocab: torch.Tensor | None, top_k: int) -> Candidates:
        """The `top_k` best of each head.

        Args:
            logits: float32 `[num_heads, batch, n]` over the draft vocabulary.
            draft_vocab: int64 `[n]`, the tokens' ids; None where they are the columns.
            top_k: 1 to n.

        Raises:
            ValueError: `top_k` is out of range.
        """
        if not 1 <= top_k <= logits.shape[-1]:
            raise ValueError(f"top_k is {top_k}, expected 1 to {logits.shape[-1]} draft tokens")
        values, columns = logits.topk(top_k, dim=-1)
        chosen = columns if draft_vocab is None else draft_vocab[columns]
        return cls(chosen.transpose(0, 1), values.transpose(0, 1), logits.transpose(0, 1))


def require_hidden(hidden: torch.Tensor, hidden_size: int) -> None:
    """Raise `ValueError` unless `hidden` is `[batch, hidden_size]`."""
    if hidden.dim() != 2 or hidden.shape[1] != hidden_size:
        raise ValueError(f"hidden has shape {list(hidden.shape)}, expected [batch, {hidden_size}]")


class DraftHeads(ABC):
    """Head h (0-based) proposes the token h + 2 ahead; the token 1 ahead is the target's own."""

    num_heads: int
    max_top_k: int
    """Size of the draft vocabulary: the most candidates a head has."""


class ParallelHeads(DraftHeads):
    """Heads that draft independently of each other, all in one call."""

    @abstractmethod
    def propose(self, hidden: torch.Tensor, token_ids: torch.Tensor, top_k: int) -> Candidates:
        """The `top_k` best candidates of each head.

        Args:
            hidden: `[batch, hidden_size]`, after the target's final norm.
            token_ids: int64 `[batch]`, the token that the target chose from `hidden`.
            top_k: candidates per head, 1 to `max_top_k`.

        Raises:
            ValueError: `hidden` has another width or `top_k` is out of range.
        """


class SequentialHeads(DraftHeads):
    """Heads that read the tokens of a branch: a tree grows level by level, one call a level.

    A node's state is a row of a tensor: what its head has to know of the hidden state and of the
    tokens from the root to the node. Rows are independent of each other.
    """

    draft_vocab: torch.Tensor | None
    """int64 `[max_top_k]`, target ids of the draft vocabulary; None for all."""

    @abstractmethod
    def begin(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """State of the roots, `[batch, state width]`.

        Args:
            hidden: `[batch, hidden_size]`, after the target's final norm.
            token_ids: int64 `[batch]`, the token that the target chose from `hidden`.

        Raises:
            ValueError: `hidden` has another width.
        """

    @abstractmethod
    def advance(self, head: int, state: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """State of nodes one level deeper, `[rows, state width of that level]`.

        Args:
            head: which is to propose their children, from 1.
            state: `[rows, state width]` of their parents.
            token_ids: int64 `[rows]` of the nodes, target vocabulary.
        """

    @abstractmethod
    def logits(self, head: int, state: torch.Tensor) -> torch.Tensor:
        """float32 `[rows, max_top_k]` over the draft vocabulary, for the children of nodes.

        Args:
            head: 0 for children of roots.
            state: `[rows, state width]` of the nodes.
        """
