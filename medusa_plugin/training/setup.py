"""Heads of each kind with fresh weights, ready to be trained, and their files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from medusa_plugin.heads.base import TargetSpec
from medusa_plugin.heads.conditioned import ConditionedHeads
from medusa_plugin.heads.recurrent import RecurrentHeads
from medusa_plugin.heads.trained import TrainedConfig
from medusa_plugin.heads.trained_files import build_trained, save_trained
from medusa_plugin.training.examples import InputStatistics
from medusa_plugin.training.loss import Objective, columns_of
from medusa_plugin.training.plain import PlainHeads, save_plain

TrainKind = Literal["medusa", "conditioned", "recurrent"]


@dataclass(frozen=True)
class Shape:
    """Which heads to make."""

    kind: TrainKind = "recurrent"
    num_heads: int = 4
    width: int = 1152
    output_rank: int = 256
    draft_vocab_size: int = 4096


def fresh_heads(
    shape: Shape,
    target: TargetSpec,
    ranked: torch.Tensor,
    inputs: InputStatistics,
    seed: int,
) -> nn.Module:
    """Heads to train, float32, on the target's device.

    Args:
        shape: which.
        target: its dtype does not matter.
        ranked: int64 token ids, most frequent first; the first are the draft vocabulary.
        inputs: of the hidden states.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    kept = ranked[: shape.draft_vocab_size].to(target.device)
    if shape.kind == "medusa":
        return PlainHeads(shape.num_heads, target, kept, inputs).to(target.device)
    assert target.embedding is not None
    embedding = target.embedding.float()
    target = replace(target, embedding=embedding, lm_head=target.lm_head.float())
    heads = build_trained(config_of(shape, target), target, kept)
    heads.inputs.mean.copy_(inputs.mean)
    heads.inputs.scale.copy_(1 / inputs.std)
    heads.inputs.embedding_scale.fill_(1 / float(embedding[kept].std()))
    return heads.to(target.device)


def config_of(shape: Shape, target: TargetSpec, base_model: str = "") -> TrainedConfig:
    """`config.json` of heads that are not plain."""
    assert shape.kind != "medusa"
    return TrainedConfig(
        kind=shape.kind,
        num_heads=shape.num_heads,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        width=shape.width,
        output_rank=shape.output_rank,
        draft_vocab_size=shape.draft_vocab_size,
        base_model=base_model,
    )


def objective_of(
    shape: Shape, target: TargetSpec, ranked: torch.Tensor, *, decay: float, distill: float
) -> Objective:
    """The loss, on the target's device."""
    kept = ranked[: shape.draft_vocab_size].to(target.device)
    lm_head = target.lm_head.index_select(0, kept) if distill else None
    return Objective(columns_of(kept, target.vocab_size), decay, distill, lm_head)


def save_heads(
    directory: Path,
    shape: Shape,
    target: TargetSpec,
    heads: nn.Module,
    ranked: torch.Tensor,
    base_model: str,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write trained heads as they are served; see `save_plain` and `save_trained`."""
    if isinstance(heads, PlainHeads):
        save_plain(directory, heads, ranked, dtype)
    else:
        assert isinstance(heads, ConditionedHeads | RecurrentHeads)
        save_trained(directory, config_of(shape, target, base_model), heads, ranked, dtype)
