"""IBM's MLP speculator: a recurrent state, fed with its own embedding of each token of a branch.

After Wertheimer et al., "Accelerating Production LLMs with Combined Token/Embedding Speculators",
2024 (arXiv:2404.19124).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from medusa_plugin.heads.base import SequentialHeads, require_hidden

_EPS = 1e-6


@dataclass(frozen=True)
class MLPStage:
    """Weights of one head; tied heads share tensors."""

    embedding: torch.Tensor
    """`[vocab_size, inner]`."""
    projection: torch.Tensor
    """`[inner, hidden_size]` for the first head, `[inner, inner]` for others."""
    norm_weight: torch.Tensor
    """`[inner]`."""
    norm_bias: torch.Tensor
    """`[inner]`."""
    output: torch.Tensor
    """`[max_top_k, inner]`."""


class MLPSpeculatorHeads(SequentialHeads):
    """s_k = GELU(norm(a P_k s_(k-1) + b E_k[token])); logits = O_k s_k.

    s_0 is the hidden state; `norm` divides by the root mean square, then scales and shifts. The
    constants let the hidden state make up half of the last state: a = 0.5 ** (1 / 2n),
    b = sqrt((1 - a^2) * inner / 2), n heads.

    Args:
        stages: one per head.
        hidden_size: of the target.
        scale_input: whether the hidden state is divided by its root mean square and by sqrt(2).
        draft_vocab: int64 `[max_top_k]`, ids of the rows of the outputs; None for all.
    """

    def __init__(
        self,
        stages: list[MLPStage],
        *,
        hidden_size: int,
        scale_input: bool,
        draft_vocab: torch.Tensor | None,
    ) -> None:
        self._stages = stages
        self._hidden_size = hidden_size
        self._scale_input = scale_input
        self._state_weight = 0.5 ** (0.5 / len(stages))
        inner = stages[0].output.shape[1]
        self._token_weight = math.sqrt((1 - self._state_weight**2) * inner / 2)
        self.num_heads = len(stages)
        self.max_top_k = stages[0].output.shape[0]
        self.draft_vocab = draft_vocab

    def begin(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See `SequentialHeads.begin`; a row is s_1."""
        require_hidden(hidden, self._hidden_size)
        state = hidden.to(self._stages[0].projection.dtype)
        if self._scale_input:
            state = _normalised(state) / math.sqrt(2)
        return self.advance(0, state, token_ids)

    def advance(self, head: int, state: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See `SequentialHeads.advance`."""
        stage = self._stages[head]
        mixed = F.linear(state, stage.projection) * self._state_weight
        mixed = mixed + F.embedding(token_ids, stage.embedding) * self._token_weight
        return F.gelu(_normalised(mixed) * stage.norm_weight + stage.norm_bias)

    def logits(self, head: int, state: torch.Tensor) -> torch.Tensor:
        """See `SequentialHeads.logits`."""
        return F.linear(state, self._stages[head].output).float()


def _normalised(x: torch.Tensor) -> torch.Tensor:
    # In float32: the square of a large channel overflows float16.
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)).to(x.dtype)
