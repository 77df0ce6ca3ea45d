"""Root-conditioned heads: every head also sees the token that the target has just chosen.

That token is known when drafting starts, so all heads still run in one call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from medusa_plugin.heads.base import Candidates, ParallelHeads, TargetSpec
from medusa_plugin.heads.trained import TrainedConfig, TrainedModule


class ConditionedHeads(TrainedModule, ParallelHeads):
    """a = SiLU(W h + U e + b), shared; head k: logits = table (V_k a).

    h is the standardised hidden state, e the embedding of the token just chosen.

    For arguments see `TrainedModule`.
    """

    def __init__(
        self, config: TrainedConfig, target: TargetSpec, draft_vocab: torch.Tensor | None
    ) -> None:
        super().__init__(config, target, draft_vocab)
        self.context = nn.Linear(config.hidden_size, config.width)
        self.heads = nn.Linear(config.width, config.num_heads * config.output_width, bias=False)

    def all_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 `[num_heads, batch, max_top_k]`; see `propose`."""
        mixed = self.context(self.inputs.hidden(hidden)) + self.token(self.inputs.tokens(token_ids))
        outputs = self.heads(F.silu(mixed)).unflatten(-1, (self.num_heads, -1))
        logits: torch.Tensor = self.output(outputs).transpose(0, 1)
        return logits

    def propose(self, hidden: torch.Tensor, token_ids: torch.Tensor, top_k: int) -> Candidates:
        """See `ParallelHeads.propose`."""
        return Candidates.best(self.all_logits(hidden, token_ids), self.draft_vocab, top_k)
