"""The draft vocabulary: which tokens heads may propose."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open

from medusa_plugin.heads.base import HeadsError
from medusa_plugin.heads.files import (
    DRAFT_VOCAB_FILE,
    DRAFT_VOCAB_KEY,
    is_there,
    read_tensors,
)

AUTO_DRAFT_VOCAB_SIZE = 4096
"""Costs under 1.5 % of tokens per step on SmolLM2-135M and an eighth of the full head's time,
which is reading its weights from memory."""

DraftVocabSize = int | Literal["auto", "full"]


def count_ranked(directory: Path) -> int:
    """Token ids that `draft_vocab.safetensors` ranks; 0 without that file.

    Raises:
        HeadsError: it is corrupt.
    """
    file = directory / DRAFT_VOCAB_FILE
    if not is_there(file):
        return 0
    try:
        with safe_open(file, framework="pt") as opened:
            return int(opened.get_slice(DRAFT_VOCAB_KEY).get_shape()[0])
    except (SafetensorError, OSError, IndexError) as error:
        raise HeadsError(
            f"{file}: no readable int32 vector {DRAFT_VOCAB_KEY!r}: {error}"
        ) from error


def read_draft_vocab(path: str | Path, vocab_size: int) -> torch.Tensor:
    """Token ids of the heads in directory `path`, most frequent first: int64 `[n]`.

    Raises:
        HeadsError: the file is missing or corrupt, or an id is repeated or not in the vocabulary.
    """
    file = Path(path) / DRAFT_VOCAB_FILE
    if not is_there(file):
        raise HeadsError(
            f"{file} is missing: a draft vocabulary needs this ranking of token ids; "
            "set draft_vocab_size to 'full' to do without"
        )
    token_ids = read_tensors(file).get(DRAFT_VOCAB_KEY)
    integer = (torch.int32, torch.int64)
    if token_ids is None or token_ids.dim() != 1 or token_ids.dtype not in integer:
        raise HeadsError(f"{file}: expected one int32 vector {DRAFT_VOCAB_KEY!r}")
    return checked_token_ids(token_ids, vocab_size, f"{file}")


def checked_token_ids(token_ids: torch.Tensor, vocab_size: int, place: str) -> torch.Tensor:
    """`token_ids` as int64.

    Raises:
        HeadsError: an id is repeated or not in the vocabulary; begins with `place`.
    """
    token_ids = token_ids.long()
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if outside.numel():
        raise HeadsError(f"{place}: token id {int(outside[0])} is not in 0..{vocab_size - 1}")
    if len(set(token_ids.tolist())) != len(token_ids):
        raise HeadsError(f"{place}: token ids are repeated")
    return token_ids


def choose_size(wanted: DraftVocabSize, *, table_rows: int | None, ranked: int) -> int | None:
    """How many tokens are proposed; None for the whole vocabulary.

    Args:
        wanted: the user's choice.
        table_rows: tokens that the heads' own output tables know; None where they know all.
        ranked: tokens that are ranked by frequency.
    """
    if isinstance(wanted, int):
        return wanted
    if table_rows is not None:
        return table_rows
    if wanted == "auto" and ranked:
        return min(AUTO_DRAFT_VOCAB_SIZE, ranked)
    return None
