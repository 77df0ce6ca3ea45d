"""CPU attention backend: tree rows go to `tvm_ops.tree_attention`, all others to vLLM's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention import selector
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from medusa_plugin.vllm_glue.support import UnsupportedFeatureError
from tvm_ops import TreeBatch, tree_attention


@dataclass(frozen=True)
class PlainRows:
    """The requests of a mixed batch that have no tree (prefill chunks, plain decode)."""

    rows: torch.Tensor
    """int64 `[n]` their rows in the batch, ascending."""
    metadata: CPUAttentionMetadata
    """vLLM's metadata as if they were the whole batch."""


@dataclass
class TreeAttentionMetadata(CPUAttentionMetadata):
    """vLLM's metadata for the whole batch, and how to split it where requests have trees."""

    trees: TreeBatch | None = None
    plain: PlainRows | None = None


class TreeAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds `TreeAttentionMetadata`; the model runner adds the trees of the step."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TreeAttentionMetadata:
        """vLLM's metadata in our class, no trees yet."""
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return TreeAttentionMetadata(
            **{field.name: getattr(plain, field.name) for field in fields(plain)}
        )

    def attach_trees(
        self,
        metadata: TreeAttentionMetadata,
        trees: TreeBatch,
        plain_requests: list[int],
        query_start: npt.NDArray[np.int32],
    ) -> None:
        """Split the batch of `metadata`, in place, into trees and `plain_requests`.

        Args:
            metadata: what `build` made for the batch.
            trees: the requests that have a tree.
            plain_requests: batch indices of all others, ascending.
            query_start: `[num_reqs + 1]` first row of each request.
        """
        metadata.trees = trees
        if not plain_requests:
            return
        lengths = (query_start[1:] - query_start[:-1])[plain_requests]
        rows = np.concatenate(
            [np.arange(query_start[i], query_start[i + 1]) for i in plain_requests]
        )
        starts = torch.zeros(len(plain_requests) + 1, dtype=torch.int32)
        starts[1:] = torch.from_numpy(np.cumsum(lengths, dtype=np.int32))
        seq_lens = metadata.seq_lens[plain_requests]
        metadata.plain = PlainRows(
            torch.from_numpy(rows).long(),
            CPUAttentionMetadata(
                num_actual_tokens=len(rows),
                max_query_len=int(lengths.max()),
                query_start_loc=starts,
                max_seq_len=int(seq_lens.max()),
                seq_lens=seq_lens,
                block_table=metadata.block_table[plain_requests],
                slot_mapping=metadata.slot_mapping,  # attention does not write, so it is not read
                scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
                    num_reqs=len(plain_requests),
                    num_heads=self.num_heads,
                    num_kv_heads=self.num_kv_heads,
                    head_dim=self.head_dim,
                    seq_lens=seq_lens,
                    dtype=self.dtype,
                    query_start_loc=starts,
                    causal=True,
                    sliding_window_size=self.window_size,
                    isa=self.isa,
                    enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                    dynamic_causal=None,
                    kv_cache_dtype=self.kv_cache_dtype,
                ),
                causal=True,
            ),
        )


class TreeAttentionImpl(CPUAttentionBackendImpl):
    """Splits the rows of a batch between vLLM's kernel and the tree kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_the_way = [
            name
            for name, present in (
                ("ALiBi", self.alibi_slopes is not None),
                ("attention sinks", self.sinks is not None),
                ("quantised KV cache", self.is_fp8_kv_cache),
            )
            if present
        ]

    def require_supported(self) -> None:
        """Raise `UnsupportedFeatureError` if the tree kernel lacks something this layer needs."""
        if self._in_the_way:
            raise UnsupportedFeatureError(
                f"medusa does not support yet: {', '.join(self._in_the_way)} in attention. "
                "Run this model without speculation."
            )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of all rows into `output`; see vLLM's method for the shapes."""
        if not isinstance(attn_metadata, TreeAttentionMetadata) or attn_metadata.trees is None:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
            return output
        plain = attn_metadata.plain
        if plain is not None:
            plain_output = torch.empty_like(output[: len(plain.rows)])
            super().forward(
                layer,
                query[plain.rows],
                key,
                value,
                kv_cache,
                plain.metadata,
                plain_output,
            )
            output[plain.rows] = plain_output
        tree_attention(
            query,
            kv_cache,
            output,
            attn_metadata.trees,
            scale=self.scale,
            layout=layer.isa,
            softcap=self.logits_soft_cap or None,
            sliding_window=None if self.sliding_window == -1 else self.sliding_window,
        )
        return output


class TreeAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with our metadata and implementation."""

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        """The implementation class."""
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeAttentionMetadataBuilder]:
        """The metadata builder class."""
        return TreeAttentionMetadataBuilder


@contextmanager
def tree_backend() -> Iterator[None]:
    """While a model is built inside, its attention layers get `TreeAttentionBackend`.

    The CPU platform always resolves the entry `CPU_ATTN`, so that entry is overridden, for the
    time of the build only: another engine in this process keeps vLLM's own backend.

    Raises:
        RuntimeError: another plugin has overridden the entry.
    """
    entry = AttentionBackendEnum.CPU_ATTN
    if entry.is_overridden():
        raise RuntimeError(
            f"attention backend CPU_ATTN is already overridden by {entry.get_path()}: medusa and "
            "that plugin cannot run together. Disable one (VLLM_PLUGINS names those to load)."
        )
    # The selector remembers its answers.
    selector._cached_get_attn_backend.cache_clear()
    register_backend(entry, f"{__name__}.{TreeAttentionBackend.__qualname__}")
    try:
        yield
    finally:
        entry.clear_override()
        selector._cached_get_attn_backend.cache_clear()
