"""Recurrent heads: one cell, fed with the tokens of a branch one by one.

After ReDrafter (Zhang et al., 2024, arXiv:2403.09919), whose cell also keeps a state over the
drafted tokens beside the target's hidden state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from medusa_plugin.heads.base import SequentialHeads, TargetSpec
from medusa_plugin.heads.trained import TrainedConfig, TrainedModule


class RecurrentHeads(TrainedModule, SequentialHeads):
    """s_k = V SiLU(W h + U e_k + R s_(k-1) + b_k); logits = table s_k.

    h is the standardised hidden state, e_k the embedding of the last token of the branch, b_k the
    only part that differs between the heads; W h is computed once for a tree.

    For arguments see `TrainedModule`.
    """

    def __init__(
        self, config: TrainedConfig, target: TargetSpec, draft_vocab: torch.Tensor | None
    ) -> None:
        super().__init__(config, target, draft_vocab)
        self.context = nn.Linear(config.hidden_size, config.width, bias=False)
        self.recur = nn.Linear(config.output_width, config.width, bias=False)
        self.biases = nn.Parameter(torch.zeros(config.num_heads, config.width))
        self.state = nn.Linear(config.width, config.output_width, bias=False)
        self._width = config.width

    def begin(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See `SequentialHeads.begin`; a row is W h and s."""
        context = self.context(self.inputs.hidden(hidden))
        mixed = context + self.token(self.inputs.tokens(token_ids)) + self.biases[0]
        return torch.cat([context, self.state(F.silu(mixed))], dim=-1)

    def advance(self, head: int, state: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See `SequentialHeads.advance`."""
        context, before = state[:, : self._width], state[:, self._width :]
        mixed = context + self.token(self.inputs.tokens(token_ids)) + self.recur(before)
        return torch.cat([context, self.state(F.silu(mixed + self.biases[head]))], dim=-1)

    def logits(self, head: int, state: torch.Tensor) -> torch.Tensor:
        """See `SequentialHeads.logits`."""
        logits: torch.Tensor = self.output(state[:, self._width :])
        return logits
