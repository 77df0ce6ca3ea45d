"""Draft heads: a hidden state of the target -> candidate tokens with probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from medusa_plugin.heads.base import Candidates, DraftHeads, HeadsError, TargetSpec
from medusa_plugin.heads.checkpoint import (
    DRAFT_VOCAB_FILE,
    WEIGHTS_FILES,
    HeadsInfo,
    peek_heads,
    read_draft_vocab,
    read_weights,
)
from medusa_plugin.heads.medusa import MedusaHeads

__all__ = [
    "AUTO_DRAFT_VOCAB_SIZE",
    "WEIGHTS_FILES",
    "Candidates",
    "DraftHeads",
    "HeadsError",
    "HeadsInfo",
    "TargetSpec",
    "load_heads",
    "peek_heads",
]

AUTO_DRAFT_VOCAB_SIZE = 4096
"""Costs under 1.5 % of tokens per step on SmolLM2-135M and an eighth of the full head's time,
which is reading its weights from memory."""


def load_heads(
    path: str | Path, target: TargetSpec, *, draft_vocab_size: int | Literal["auto", "full"]
) -> DraftHeads:
    """Load the heads in directory `path` for `target`.

    Args:
        path: holds `medusa_lm_head.safetensors` or `.pt`; optionally `config.json`,
            `draft_vocab.safetensors` (token_ids int32 `[n]`, most frequent first).
        target: whose language-model head the heads may share.
        draft_vocab_size: only that many of the most frequent tokens are proposed; "full": all;
            "auto": 4096 where there is a ranking by frequency, otherwise all.

    Raises:
        HeadsError: the heads cannot be read, do not fit `target`, or have no such ranking.
    """
    info = peek_heads(path, use_tuning=False)
    info.require_target(hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    if tuple(target.lm_head.shape[1:]) != (target.hidden_size,) or (
        target.lm_head.shape[0] < target.vocab_size
    ):
        raise HeadsError(
            f"the target's lm_head has shape {list(target.lm_head.shape)}, expected at least "
            f"{target.vocab_size} rows of {target.hidden_size}"
        )
    size = None
    if isinstance(draft_vocab_size, int):
        size = draft_vocab_size
    elif draft_vocab_size == "auto" and info.draft_vocab_ranked:
        size = min(AUTO_DRAFT_VOCAB_SIZE, info.draft_vocab_ranked)
    draft_vocab = None if size is None else _most_frequent(path, target, size)
    lm_head = target.lm_head[: target.vocab_size].to(target.dtype)
    return MedusaHeads(read_weights(info, target), lm_head, draft_vocab)


def _most_frequent(path: str | Path, target: TargetSpec, size: int) -> torch.Tensor:
    ranked = read_draft_vocab(path, target.vocab_size)
    if not 1 <= size <= len(ranked):
        raise HeadsError(
            f"draft_vocab_size is {size}, but {Path(path) / DRAFT_VOCAB_FILE} ranks {len(ranked)} "
            "token ids: choose from 1 to that, or 'full'"
        )
    return ranked[:size].to(target.device)
