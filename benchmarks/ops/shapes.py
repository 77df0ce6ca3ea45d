"""Which shapes are measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

HEADS = {64: (3, 3), 128: (8, 4)}  # head_dim -> (KV heads, query heads of each)
# 8 x 8192 tokens of 32 heads would take minutes a shape and gigabytes per copy of the cache.
LARGEST_HEADS = {64: (3, 3), 128: (2, 4)}
NOTES = (
    "head_dim 128 with context 8192 and batch 8 has 2 KV heads instead of 8: the full shape takes "
    "minutes and gigabytes",
)

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionShape:
    """`batch` equal chains of `rows` rows after `context` tokens each."""

    head_dim: int
    batch: int
    context: int
    rows: int
    kv_heads: int
    group: int

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def flops(self) -> int:
        """Operations of both products, counting only the positions a row sees."""
        seen = self.rows * self.context + self.rows * (self.rows + 1) // 2
        return 4 * self.batch * self.heads * self.head_dim * seen

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of all keys and values, each counted once."""
        tokens = self.batch * (self.context + self.rows)
        return 2 * tokens * self.kv_heads * self.head_dim * itemsize


@dataclass(frozen=True)
class CompactionShape:
    """`moves` accepted rows of each of `batch` requests, moved in all layers."""

    layers: int
    kv_heads: int
    head_dim: int
    layout: str
    dtype: str
    batch: int
    moves: int = 4


def attention_shapes() -> list[AttentionShape]:
    """Every shape, small ones first within a head_dim and batch."""
    shapes = []
    for head_dim, batch, context, rows in itertools.product(
        (64, 128), (1, 8), (128, 512, 2048, 8192), (1, 4, 8, 16, 32, 64)
    ):
        heads = LARGEST_HEADS if (batch, context) == (8, 8192) else HEADS
        shapes.append(AttentionShape(head_dim, batch, context, rows, *heads[head_dim]))
    return shapes


def compaction_shapes() -> list[CompactionShape]:
    """Every shape: two models, layouts and element types, batches."""
    return [
        CompactionShape(*model, *kind, batch)
        for model, kind, batch in itertools.product(
            ((30, 3, 64), (32, 8, 128)),
            (("vec", "bfloat16"), ("vec", "float32"), ("amx", "bfloat16")),
            (1, 4, 16, 64),
        )
    ]


def every(count: int, items: Sequence[T]) -> list[T]:
    """One of each `count` items, at a place that changes: no value of a dimension is left out."""
    picks = (start + 3 * (start // count) % count for start in range(0, len(items), count))
    return [items[pick] for pick in picks if pick < len(items)]
