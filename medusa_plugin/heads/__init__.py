"""Draft heads: a hidden state of the target -> candidate tokens with probabilities."""

from __future__ import annotations

from pathlib import Path

from medusa_plugin.heads.base import Candidates, DraftHeads, HeadsError, TargetSpec
from medusa_plugin.heads.checkpoint import HeadsInfo, peek_heads
from medusa_plugin.heads.draft_vocab import AUTO_DRAFT_VOCAB_SIZE, DraftVocabSize
from medusa_plugin.heads.hub import locate_heads
from medusa_plugin.heads.source import MEDUSA_FILES, holds_heads

__all__ = [
    "AUTO_DRAFT_VOCAB_SIZE",
    "MEDUSA_FILES",
    "Candidates",
    "DraftHeads",
    "HeadsError",
    "HeadsInfo",
    "TargetSpec",
    "holds_heads",
    "load_heads",
    "locate_heads",
    "peek_heads",
]


def load_heads(
    path: str | Path, target: TargetSpec, *, draft_vocab_size: DraftVocabSize
) -> DraftHeads:
    """Load the heads in directory `path` for `target`.

    Args:
        path: holds heads of any kind and format that `peek_heads` knows; optionally
            `draft_vocab.safetensors` (token_ids int32 `[n]`, most frequent first).
        target: whose language-model head the heads may share.
        draft_vocab_size: only that many of the most frequent tokens are proposed; "full": all that
            the heads know; "auto": all where the heads have tables of few tokens, 4096 where there
            is a ranking by frequency, otherwise all.

    Raises:
        HeadsError: the heads cannot be read, do not fit `target`, or have no such ranking.
    """
    return peek_heads(path, use_tuning=False).build(target, draft_vocab_size)
