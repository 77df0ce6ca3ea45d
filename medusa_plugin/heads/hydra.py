"""Hydra heads: head k reads the hidden state and the embeddings of all tokens of the branch.

After Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", 2024
(arXiv:2402.05109).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from medusa_plugin.heads.base import SequentialHeads, require_hidden

Linear = tuple[torch.Tensor, torch.Tensor]
"""Weight `[out, in]` and bias `[out]`."""


@dataclass(frozen=True)
class HydraHead:
    """Weights of one head."""

    first: Linear
    """Of the first block: `[hidden_size, (k + 2) * hidden_size]` for head k."""
    shortcut: Linear
    """Takes the place of the first block's residual connection; of the same shape."""
    blocks: tuple[Linear, ...]
    """Of the residual blocks after it."""
    output: Linear
    """`[max_top_k, hidden_size]`."""


class HydraHeads(SequentialHeads):
    """x = S z + SiLU(W z), z = [h, e_0, ..., e_k]; then residual blocks and a language-model head.

    h is the target's hidden state, e_i the target's embedding of token i of the branch.

    Args:
        heads: their weights.
        embedding: `[rows, hidden_size]` of the target.
        draft_vocab: int64 `[max_top_k]`, ids of the rows of the outputs; None for all.
    """

    def __init__(
        self, heads: list[HydraHead], embedding: torch.Tensor, draft_vocab: torch.Tensor | None
    ) -> None:
        self._heads = heads
        self._embedding = embedding
        self.num_heads = len(heads)
        self.max_top_k = heads[0].output[0].shape[0]
        self.draft_vocab = draft_vocab

    def begin(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See `SequentialHeads.begin`; a row is z."""
        require_hidden(hidden, self._embedding.shape[1])
        return self.advance(0, hidden.to(self._heads[0].output[0].dtype), token_ids)

    def advance(self, head: int, state: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See `SequentialHeads.advance`."""
        return torch.cat([state, F.embedding(token_ids, self._embedding).to(state.dtype)], dim=-1)

    def logits(self, head: int, state: torch.Tensor) -> torch.Tensor:
        """See `SequentialHeads.logits`."""
        weights = self._heads[head]
        x = F.linear(state, *weights.shortcut) + F.silu(F.linear(state, *weights.first))
        for block in weights.blocks:
            x = x + F.silu(F.linear(x, *block))
        return F.linear(x, *weights.output).float()
