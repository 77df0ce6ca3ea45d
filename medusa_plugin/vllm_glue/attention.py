"""CPU attention backend: tree rows go to `tvm_ops.tree_attention`, all others to vLLM's kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import CommonAttentionMetadata
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
    overridden_backend,
    plain_requests,
    require_none_of,
    run_plain_rows,
)
from tvm_ops import TreeBatch, tree_attention


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


class TreeAttentionImpl(CPUAttentionBackendImpl):
    """Splits the rows of a batch between vLLM's kernel and the tree kernel."""

    def require_supported(self) -> None:
        """Raise `UnsupportedFeatureError` if the tree kernel lacks something this layer needs."""
        require_none_of(
            {
                "ALiBi": self.alibi_slopes is not None,
                "attention sinks": self.sinks is not None,
                "quantised KV cache": self.is_fp8_kv_cache,
            }
        )

    @staticmethod
    def kv_layout(layer: Any) -> str:
        """Name in `tvm_ops.LAYOUTS` of the layer's cache."""
        layout: str = layer.isa
        return layout

    @staticmethod
    def write_kv(
        layer: Any,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write keys and values `[N, kv_heads, head_size]` as vLLM does for this layer."""
        num_blocks, kv_heads, block_size, _ = cache.shape
        parts = cache.view(num_blocks, kv_heads, 2 * block_size, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *parts, slots, layer.isa)

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
        attend = super().forward
        run_plain_rows(
            attn_metadata.plain,
            query,
            output,
            lambda q, metadata, o: attend(layer, q, key, value, kv_cache, metadata, o),
        )
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
