"""Plain Medusa heads: residual blocks on the hidden state, then a language-model head.

Medusa (Cai et al., 2024): x <- x + SiLU(W x + b) per block, logits = lm_head x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from medusa_plugin.heads.base import Candidates, ParallelHeads, require_hidden


@dataclass(frozen=True)
class HeadWeights:
    """Weights of all heads, stacked, in the target's dtype and on its device."""

    num_heads: int
    weights: tuple[torch.Tensor, ...]
    """Per layer `[num_heads, hidden_size, hidden_size]`, output features before input features."""
    biases: tuple[torch.Tensor, ...]
    """Per layer `[num_heads, hidden_size]`; empty for heads without biases."""
    lm_heads: torch.Tensor | None
    """`[num_heads, rows, hidden_size]`, or `[rows, hidden_size]` where the heads share one of the
    checkpoint's; None where they share the target's."""


class MedusaHeads(ParallelHeads):
    """All heads in one batched pass.

    Args:
        weights: of the residual blocks, and the heads' own language-model heads if they have any.
        lm_head: `[vocab_size, hidden_size]` of the target, shared by heads without their own.
        draft_vocab: int64 `[n]`, distinct ids of the tokens that may be proposed; None for all.
        columns: int64 `[n]`, rows of the language-model heads for these; None for all.
        logit_scale: factor of the logits.
    """

    def __init__(
        self,
        weights: HeadWeights,
        lm_head: torch.Tensor,
        draft_vocab: torch.Tensor | None,
        *,
        columns: torch.Tensor | None,
        logit_scale: float = 1.0,
    ) -> None:
        output = lm_head if weights.lm_heads is None else weights.lm_heads
        if columns is not None:
            output = output.index_select(-2, columns)
        self._output = output
        self._logit_scale = logit_scale
        self._draft_vocab = draft_vocab
        # Stored as baddbmm takes them: input features before output features.
        self._blocks = [weight.transpose(1, 2) for weight in weights.weights]
        self._biases = [bias.unsqueeze(1) for bias in weights.biases]
        self.num_heads = weights.num_heads
        self.max_top_k = output.shape[-2]

    def propose(self, hidden: torch.Tensor, token_ids: torch.Tensor, top_k: int) -> Candidates:
        """See `ParallelHeads.propose`; `token_ids` is not looked at by this kind."""
        require_hidden(hidden, self._output.shape[-1])
        return Candidates.best(self.logits(hidden), self._draft_vocab, top_k)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[num_heads, batch, max_top_k]` over the draft vocabulary."""
        x = hidden.to(self._output.dtype).expand(self.num_heads, -1, -1)
        for layer, weight in enumerate(self._blocks):
            if self._biases:
                x = x + F.silu(torch.baddbmm(self._biases[layer], x, weight))
            else:
                x = x + F.silu(torch.bmm(x, weight))
        if self._output.dim() == 2:
            logits = F.linear(x, self._output).float()
        else:
            logits = torch.bmm(x, self._output.transpose(1, 2)).float()
        return logits if self._logit_scale == 1.0 else logits * self._logit_scale
