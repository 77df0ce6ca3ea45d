"""CPU attention backend: tree rows go to `tvm_ops.tree_attention`, all others to vLLM's kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
    _get_attn_isa,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from medusa_plugin.vllm_glue.attention_rows import (
    PlainRows,
    TreeImpl,
    TreeMetadata,
    TreeMetadataBuilder,
    overridden_backend,
    plain_requests,
)
from tvm_ops import TreeBatch


@dataclass
class TreeAttentionMetadata(TreeMetadata, CPUAttentionMetadata):
    """vLLM's metadata for the whole batch, and its trees (`TreeBatch`)."""


class TreeAttentionMetadataBuilder(TreeMetadataBuilder, CPUAttentionMetadataBuilder):
    """Builds `TreeAttentionMetadata`; the model runner adds the trees of the step."""

    metadata_class = TreeAttentionMetadata

    def attach_trees(
        self,
        metadata: TreeAttentionMetadata,
        trees: TreeBatch,
        requests: list[int],
        query_start: npt.NDArray[np.int32],
    ) -> None:
        """Split the batch of `metadata`, in place, into trees and plain `requests`.

        Args:
            metadata: what `build` made for the batch.
            trees: the requests that have a tree.
            requests: batch indices of all others, ascending.
            query_start: `[num_reqs + 1]` first row of each request.
        """
        metadata.trees = trees
        if not requests:
            return
        found = plain_requests(requests, query_start)
        seq_lens = metadata.seq_lens[requests]
        metadata.plain = PlainRows(
            found.rows,
            CPUAttentionMetadata(
                num_actual_tokens=len(found.rows),
                max_query_len=found.max_query_len,
                query_start_loc=found.starts,
                max_seq_len=int(seq_lens.max()),
                seq_lens=seq_lens,
                block_table=metadata.block_table[requests],
                slot_mapping=metadata.slot_mapping,  # attention does not write, so it is not read
                scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
                    num_reqs=len(requests),
                    num_heads=self.num_heads,
                    num_kv_heads=self.num_kv_heads,
                    head_dim=self.head_dim,
                    seq_lens=seq_lens,
                    dtype=self.dtype,
                    query_start_loc=found.starts,
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


class TreeAttentionImpl(TreeImpl, CPUAttentionBackendImpl):
    """Splits the rows of a batch between vLLM's CPU kernel and the tree kernel."""

    @property
    def tree_window(self) -> int | None:
        """See `TreeImpl`."""
        window: int = self.sliding_window
        return None if window == -1 else window

    @property
    def has_quantized_cache(self) -> bool:
        """See `TreeImpl`."""
        is_fp8: bool = self.is_fp8_kv_cache
        return is_fp8

    @staticmethod
    def kv_layout(layer: Any) -> str:
        """See `TreeImpl.kv_layout`."""
        layout: str = layer.isa
        return layout

    def write_kv(
        self,
        layer: Any,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """See `TreeImpl.write_kv`."""
        num_blocks, kv_heads, block_size, _ = cache.shape
        parts = cache.view(num_blocks, kv_heads, 2 * block_size, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *parts, slots, layer.isa)


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


def tree_backend() -> AbstractContextManager[None]:
    """While a model is built inside, its attention layers get `TreeAttentionBackend`.

    The CPU platform always resolves the entry `CPU_ATTN`.
    """
    return overridden_backend(
        AttentionBackendEnum.CPU_ATTN, f"{__name__}.{TreeAttentionBackend.__qualname__}"
    )


def forecast_layout(vllm_config: Any) -> str:
    """The layout that the caches will have, before there are layers to ask."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    head_size = model.get_head_size()
    layout: str = _get_attn_isa(model.dtype, cache.block_size, head_size, cache.cache_dtype)
    return layout
