"""What the attention backends of all devices share: which rows of a batch are trees' rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from medusa_plugin.vllm_glue.support import UnsupportedFeatureError


@dataclass(frozen=True)
class PlainRows:
    """The requests of a mixed batch that have no tree (prefill chunks, plain decode)."""

    rows: torch.Tensor
    """int64 `[n]` their rows in the batch, ascending, on the batch's device."""
    metadata: Any
    """vLLM's metadata as if they were the whole batch."""


@dataclass(frozen=True)
class PlainRequests:
    """Where the requests without tree are, on the CPU."""

    rows: torch.Tensor
    """int64 `[n]` their rows in the batch, ascending."""
    starts: torch.Tensor
    """int32 `[num_plain + 1]` first of these rows of each request."""
    max_query_len: int
    """Rows of the longest request."""


def plain_requests(requests: list[int], query_start: npt.NDArray[np.int32]) -> PlainRequests:
    """Rows of `requests` (batch indices, ascending, at least one) in a batch.

    Args:
        requests: batch indices.
        query_start: `[num_reqs + 1]` first row of each request of the batch.
    """
    lengths = (query_start[1:] - query_start[:-1])[requests]
    rows = np.concatenate([np.arange(query_start[i], query_start[i + 1]) for i in requests])
    starts = torch.zeros(len(requests) + 1, dtype=torch.int32)
    starts[1:] = torch.from_numpy(np.cumsum(lengths, dtype=np.int32))
    return PlainRequests(torch.from_numpy(rows).long(), starts, int(lengths.max()))


def run_plain_rows(
    plain: PlainRows | None,
    query: torch.Tensor,
    output: torch.Tensor,
    attend: Callable[[torch.Tensor, Any, torch.Tensor], Any],
) -> None:
    """Write attention of the plain rows into `output`: `attend(query, metadata, output)` on them.

    query, output: `[num_tokens, num_heads, head_size]` of the whole batch.
    """
    if plain is None:
        return
    plain_output = torch.empty_like(output[: len(plain.rows)])
    attend(query[plain.rows], plain.metadata, plain_output)
    output[plain.rows] = plain_output


def require_none_of(present: dict[str, bool]) -> None:
    """Raise `UnsupportedFeatureError` naming what an attention layer has and trees can't."""
    found = [name for name, is_there in present.items() if is_there]
    if found:
        raise UnsupportedFeatureError(
            f"medusa does not support yet: {', '.join(found)} in attention. "
            "Run this model without speculation."
        )


@contextmanager
def overridden_backend(entry: AttentionBackendEnum, path: str) -> Iterator[None]:
    """While a model is built inside, its attention layers get the backend class at `path`.

    The platform resolves `entry`, so that entry is overridden, for the time of the build only:
    another engine in this process keeps vLLM's own backend.

    Raises:
        RuntimeError: another plugin has overridden the entry.
    """
    if entry.is_overridden():
        raise RuntimeError(
            f"attention backend {entry.name} is already overridden by {entry.get_path()}: medusa "
            "and that plugin cannot run together. Disable one (VLLM_PLUGINS names those to load)."
        )
    # The selector remembers its answers.
    selector._cached_get_attn_backend.cache_clear()
    register_backend(entry, path)
    try:
        yield
    finally:
        entry.clear_override()
        selector._cached_get_attn_backend.cache_clear()
