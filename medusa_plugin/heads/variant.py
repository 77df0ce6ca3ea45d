"""What a checkpoint's kind decides: its structure, and how its heads are built."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from medusa_plugin.heads.base import DraftHeads, HeadsError, TargetSpec
from medusa_plugin.heads.draft_vocab import read_draft_vocab
from medusa_plugin.heads.source import Source


class Variant(ABC):
    """Heads of one kind in a checkpoint; no weight is read before `build`."""

    source: Source
    kind: str
    """In one word, as in `config.json` of our own format."""
    format: str
    """Whose layout of files and names it is."""
    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None
    """Of the target, where the tensors tell it; None otherwise."""
    has_bias: bool
    names: tuple[str, ...]
    """Of the heads' tensors in the files."""
    warnings: tuple[str, ...] = ()
    """What is odd, but no hindrance."""
    table_rows: int | None = None
    """Tokens that the heads' own output tables know; None where they know all."""
    reads_tokens: bool = False
    """Whether the heads need the target's input embedding."""

    @abstractmethod
    def describe(self) -> str:
        """One phrase for the log, e.g. "4 Medusa heads, 1 layer, shared lm head"."""

    @abstractmethod
    def build(self, target: TargetSpec, draft_vocab: torch.Tensor | None) -> DraftHeads:
        """Heads that run.

        Args:
            target: a fitting one.
            draft_vocab: int64 `[n]` ids of the tokens that may be proposed, a prefix of
                `ranking`; None for all.

        Raises:
            HeadsError: a file is corrupt, or a tensor has NaN or infinite values.
        """

    def ranking(self, vocab_size: int) -> torch.Tensor:
        """Token ids, most frequent first: int64 `[n]`.

        Raises:
            HeadsError: there is none, or it is malformed.
        """
        return read_draft_vocab(self.source.directory, vocab_size)


def counted(number: int, noun: str) -> str:
    """Number and noun, e.g. "4 heads"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def require_shape(source: Source, name: str, expected: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape.

    Raises:
        HeadsError: names it with both shapes.
    """
    header = source.headers[name]
    if header.shape != expected:
        raise HeadsError(
            f"{header.file}: {name} has shape {list(header.shape)}, expected {list(expected)} as "
            "in the other tensors"
        )
