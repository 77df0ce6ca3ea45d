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


class DraftHeads(ABC):
    """Heads that draft from one hidden state: head h (0-based) proposes the token h + 2 ahead.

    The token 1 ahead is the target's own.
    """

    num_heads: int
    max_top_k: int
    """Size of the draft vocabulary: the most candidates a head has."""

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
