"""Heads in our own format: `config.json`, `heads.safetensors`, `draft_vocab.safetensors`."""

from __future__ import annotations

from pathlib import Path

import torch

from medusa_plugin.atomic_file import write_whole
from medusa_plugin.heads.base import TargetSpec
from medusa_plugin.heads.conditioned import ConditionedHeads
from medusa_plugin.heads.files import CONFIG_FILE, DRAFT_VOCAB_FILE, DRAFT_VOCAB_KEY, write_tensors
from medusa_plugin.heads.recurrent import RecurrentHeads
from medusa_plugin.heads.source import TRAINED_FILE
from medusa_plugin.heads.trained import TrainedConfig

TrainedHeads = ConditionedHeads | RecurrentHeads


def build_trained(
    config: TrainedConfig, target: TargetSpec, draft_vocab: torch.Tensor | None
) -> TrainedHeads:
    """Heads with fresh weights, float32 on the CPU; see the kind's own class for arguments."""
    kinds: dict[str, type[ConditionedHeads] | type[RecurrentHeads]] = {
        "conditioned": ConditionedHeads,
        "recurrent": RecurrentHeads,
    }
    return kinds[config.kind](config, target, draft_vocab)


def save_trained(
    directory: Path,
    config: TrainedConfig,
    heads: TrainedHeads,
    draft_vocab: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write heads to `directory`, which is made.

    Args:
        directory: where to.
        config: of the heads.
        heads: trained ones.
        draft_vocab: int64 `[n]`, most frequent first; the first `config.draft_vocab_size` are
            the rows of the heads' output table.
        dtype: of the weights in the file.
    """
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in heads.state_dict().items()
    }
    write_tensors(tensors, directory / TRAINED_FILE)
    ranked = {DRAFT_VOCAB_KEY: draft_vocab.to("cpu", torch.int32).contiguous()}
    write_tensors(ranked, directory / DRAFT_VOCAB_FILE)
    write_whole(directory / CONFIG_FILE, config.model_dump_json(indent=1) + "\n")
