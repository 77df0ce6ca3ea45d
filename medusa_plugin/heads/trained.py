"""The kinds of head that `medusa train` makes besides plain Medusa: what they have in common.

They are modules over the target's hidden state and the embedding of tokens, trained and served by
the same code.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from medusa_plugin.heads.base import HeadsError, TargetSpec, require_hidden
from medusa_plugin.heads.packed import PackedLinear, pack_linears

Kind = Literal["conditioned", "recurrent"]


class TrainedConfig(BaseModel):
    """`config.json` of heads in our own format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_type: Literal["medusa_trained_heads"] = "medusa_trained_heads"
    version: Literal[1] = 1
    kind: Kind
    num_heads: int = Field(ge=1, le=64)
    hidden_size: int = Field(ge=1)
    """Of the target."""
    vocab_size: int = Field(ge=1)
    """Of the target."""
    width: int = Field(ge=1)
    """Of the hidden layer."""
    output_rank: int = Field(ge=0)
    """Width of the heads' own output table; 0 where they share the target's lm head."""
    draft_vocab_size: int = Field(ge=1)
    """Rows of the output table: tokens of `draft_vocab.safetensors`, from the first."""
    base_model: str = ""
    """Name of the target; nothing is decided by it."""

    @property
    def output_width(self) -> int:
        """Of what a head gives to its output layer."""
        return self.output_rank or self.hidden_size


class Inputs(nn.Module):
    """Hidden states, standardised per channel, and embeddings of tokens.

    A few channels of a target's hidden state are many times as large as the others; `mean` and
    `scale` are measured on the training text.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    embedding_scale: torch.Tensor
    embedding: torch.Tensor

    def __init__(self, config: TrainedConfig, target: TargetSpec) -> None:
        super().__init__()
        if target.embedding is None:
            raise HeadsError(
                f"{config.kind} heads read the target's input embedding, which this target does "
                "not give: use plain Medusa heads"
            )
        self.hidden_size = config.hidden_size
        self.register_buffer("mean", torch.zeros(config.hidden_size))
        self.register_buffer("scale", torch.ones(config.hidden_size))
        self.register_buffer("embedding_scale", torch.ones(()))
        self.register_buffer("embedding", target.embedding, persistent=False)

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[batch, hidden_size]`, standardised."""
        require_hidden(hidden, self.hidden_size)
        return (hidden.to(self.mean.dtype) - self.mean) * self.scale

    def tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden_size]`."""
        return F.embedding(token_ids, self.embedding).to(self.mean.dtype) * self.embedding_scale


class Output(nn.Module):
    """Logits over the draft vocabulary: by a table of its own, or the target's lm head."""

    def __init__(
        self, config: TrainedConfig, target: TargetSpec, draft_vocab: torch.Tensor | None
    ) -> None:
        super().__init__()
        if config.output_rank:
            rows = config.draft_vocab_size if draft_vocab is None else len(draft_vocab)
            self.table = nn.Parameter(torch.empty(rows, config.output_rank))
            nn.init.normal_(self.table, std=config.output_rank**-0.5)
        else:
            lm_head = target.lm_head[: target.vocab_size]
            kept = lm_head if draft_vocab is None else lm_head.index_select(0, draft_vocab)
            self.register_buffer("table", kept, persistent=False)

        self._packed: PackedLinear | None = None

    @property
    def size(self) -> int:
        """Of the draft vocabulary."""
        return int(self.table.shape[0])

    def pack(self) -> None:
        """Get ready to serve."""
        self._packed = PackedLinear(self.table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 `[..., size]` of `[..., output width]`."""
        if self._packed is not None:
            logits: torch.Tensor = self._packed(x).float()
            return logits
        return F.linear(x, self.table.to(x.dtype)).float()


class TrainedModule(nn.Module):
    """What every kind trained here has: its inputs, a map of tokens, and its output.

    Args:
        config: of the checkpoint.
        target: gives the embedding, and the lm head where there is no table.
        draft_vocab: int64 `[n]`, distinct ids of the tokens that may be proposed; None for all.
    """

    def __init__(
        self, config: TrainedConfig, target: TargetSpec, draft_vocab: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.inputs = Inputs(config, target)
        self.token = nn.Linear(config.hidden_size, config.width, bias=False)
        self.output = Output(config, target, draft_vocab)
        self.num_heads = config.num_heads
        self.max_top_k = self.output.size
        self.draft_vocab = draft_vocab

    def pack(self) -> None:
        """Get ready to serve; nothing can be trained or saved any more."""
        self.output.pack()
        pack_linears(self)
