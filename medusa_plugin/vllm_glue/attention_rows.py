"""What the attention backends of all devices share: which rows of a batch are trees' rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from medusa_plugin.vllm_glue.support import UnsupportedFeatureError
from tvm_ops import TreeBatch, TreeTables, tree_attention


@dataclass(frozen=True)
class PlainRows:
    """The requests of a mixed batch that have no tree (prefill chunks, plain decode)."""

    rows: torch.Tensor
    """int64 `[n]` their rows in the batch, ascending, on the batch's device."""
    metadata: Any
    """vLLM's metadata as if they were the whole batch."""


@dataclass
class TreeMetadata:
    """How to split a batch where requests have trees; mixed in before vLLM's metadata."""

    trees: TreeBatch | TreeTables | None = None
    plain: PlainRows | None = None


class TreeMetadataBuilder(AttentionMetadataBuilder):
    """Builds `metadata_class`; mixed in before vLLM's builder. The model runner adds the trees."""

    metadata_class: type[Any]
    """vLLM's metadata with `TreeMetadata` mixed in."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """vLLM's metadata in our class, no trees yet."""
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return self.metadata_class(**{f.name: getattr(plain, f.name) for f in fields(plain)})


class TreeImpl(AttentionImpl):
    """Splits the rows of a batch between vLLM's kernel and the tree kernel.

    Mixed in before vLLM's implementation.

    Raises:
        UnsupportedFeatureError: the tree kernel lacks something this layer needs. Layers are made
            before weights are loaded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._require_supported()

    @property
    @abstractmethod
    def tree_window(self) -> int | None:
        """Positions that a row sees up to its own, or None for all."""

    @property
    @abstractmethod
    def has_quantized_cache(self) -> bool:
        """Whether keys and values are stored in fewer bits than the model's dtype."""

    @staticmethod
    @abstractmethod
    def kv_layout(layer: Any) -> str:
        """Name in `tvm_ops.LAYOUTS` of the layer's cache."""

    @abstractmethod
    def write_kv(
        self,
        layer: Any,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write keys and values `[N, kv_heads, head_size]` as vLLM does for this layer."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of all rows into `output`; see vLLM's method for the shapes."""
        attend = super().forward
        if not isinstance(attn_metadata, TreeMetadata) or attn_metadata.trees is None:
            scales = (output_scale, output_block_scale)
            attend(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
            return output
        plain = attn_metadata.plain
        if plain is not None:
            plain_output = torch.empty_like(output[: len(plain.rows)])
            attend(layer, query[plain.rows], key, value, kv_cache, plain.metadata, plain_output)
            output[plain.rows] = plain_output
        tree_attention(
            query,
            kv_cache,
            output,
            attn_metadata.trees,
            scale=self.scale,
            layout=self.kv_layout(layer),
            softcap=self.logits_soft_cap or None,
            sliding_window=self.tree_window,
        )
        return output

    def _require_supported(self) -> None:
        present = {
            "ALiBi": self.alibi_slopes is not None,
            "attention sinks": self.sinks is not None,
            "quantised KV cache": self.has_quantized_cache,
        }
        found = [name for name, is_there in present.items() if is_there]
        if found:
            raise UnsupportedFeatureError(
                f"medusa does not support yet: {', '.join(found)} in attention. "
                "Run this model without speculation."
            )


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
