"""Tensor parallelism: one rank decides, the others do the same.

Every rank computes its share of the target. The first rank alone holds the heads, draws tokens,
accepts, drafts, chooses sizes and measures costs; the others are told. Random states, clocks and
caches of files differ between ranks, so whatever they judged by themselves could differ too, and
ranks that part run different shapes and hang.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group

Told = TypeVar("Told")


def decides() -> bool:
    """Whether this rank decides; the only one does."""
    first: bool = get_tp_group().is_first_rank
    return first


def tell(message: Told) -> Told:
    """Tell the other ranks; each of them has to call `hear` for it. Pickled; does not wait."""
    told: Told = get_tp_group().broadcast_object(message)
    return told


def hear() -> Any:
    """What the deciding rank tells next; waits for it."""
    return get_tp_group().broadcast_object()


def gather_vocabulary(layer: Any) -> torch.Tensor | None:
    """The whole weight of a layer whose rows, one per token, are split between ranks.

    Args:
        layer: vLLM's language-model head or embedding.

    Returns:
        `[padded vocab, hidden]`: rows in the order of token ids, then padding. The weight itself
        where it is not split, a copy where it is; None on the ranks that do not decide.
    """
    weight: torch.Tensor = layer.weight.data
    if getattr(layer, "tp_size", 1) > 1:
        # Each rank holds a range of ids, the ranges follow each other, padding comes last.
        whole: torch.Tensor | None = get_tp_group().gather(weight, dst=0, dim=0)
        return whole
    return weight if decides() else None
