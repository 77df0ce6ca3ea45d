"""CUDA attention backend: tree rows go to `tvm_ops.tree_attention`, others to flash-attention."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from medusa_plugin.vllm_glue.attention_rows import (
    PlainRows,
    overridden_backend,
    plain_requests,
    require_none_of,
    run_plain_rows,
)
from tvm_ops import TreeBatch, TreeTables, tree_attention

LAYOUT = "strided"


@dataclass
class TreeFlashAttentionMetadata(FlashAttentionMetadata):
    """vLLM's metadata for the whole batch, and how to split it where requests have trees."""

    trees: TreeTables | None = None
    plain: PlainRows | None = None


class TreeFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds `TreeFlashAttentionMetadata`; the model runner adds the trees of the step."""

    _tables: TreeTables | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """None: which kernels run depends on the trees of the step. vLLM then captures the model
        piecewise, between the attention layers."""
        return AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TreeFlashAttentionMetadata:
        """vLLM's metadata in our class, no trees yet."""
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return TreeFlashAttentionMetadata(
            **{field.name: getattr(plain, field.name) for field in fields(plain)}
        )

    def attach_trees(
        self,
        metadata: TreeFlashAttentionMetadata,
        trees: TreeBatch,
        requests: list[int],
        query_start: npt.NDArray[np.int32],
    ) -> None:
        """Split the batch of `metadata`, in place, into trees and plain `requests`.

        Args:
            metadata: what `build` made for the batch.
            trees: the requests that have a tree; copied into the device's tables.
            requests: batch indices of all others, ascending.
            query_start: `[num_reqs + 1]` first row of each request.
        """
        if self._tables is None:
            self._tables = self._make_tables()
        self._tables.update(trees)
        metadata.trees = self._tables
        if not requests:
            return
        found = plain_requests(requests, query_start)
        device = metadata.seq_lens.device
        chosen = torch.tensor(requests, device=device)
        metadata.plain = PlainRows(
            found.rows.to(device),
            FlashAttentionMetadata(
                num_actual_tokens=len(found.rows),
                max_query_len=found.max_query_len,
                query_start_loc=found.starts.to(device),
                max_seq_len=metadata.max_seq_len,
                seq_lens=metadata.seq_lens[chosen],
                block_table=metadata.block_table[chosen],
                slot_mapping=metadata.slot_mapping,  # attention does not write, so it is not read
                causal=True,
            ),
        )

    def _make_tables(self) -> TreeTables:
        config = self.vllm_config
        layers = get_layers_from_vllm_config(config, Attention, self.layer_names)
        cache = next(iter(layers.values())).kv_cache
        block_size, max_rows = cache.shape[2], 1 + config.num_speculative_tokens
        return TreeTables(
            cache.device,
            num_blocks=cache.shape[0],
            block_size=block_size,
            max_trees=config.scheduler_config.max_num_seqs,
            max_rows=max_rows,
            max_blocks=-(-(config.model_config.max_model_len + max_rows) // block_size),
            windows=sorted({layer.impl.tree_window for layer in layers.values()}, key=str),
        )


class TreeFlashAttentionImpl(FlashAttentionImpl):
    """Splits the rows of a batch between flash-attention and the tree kernel."""

    @property
    def tree_window(self) -> int | None:
        """Positions that a row sees up to its own, or None for all."""
        left: int = self.sliding_window[0]
        return left + 1 if left >= 0 else None

    def require_supported(self) -> None:
        """Raise `UnsupportedFeatureError` if the tree kernel lacks something this layer needs."""
        require_none_of(
            {
                "ALiBi": self.alibi_slopes is not None,
                "attention sinks": self.sinks is not None,
                "quantised KV cache": is_quantized_kv_cache(self.kv_cache_dtype),
            }
        )

    @staticmethod
    def kv_layout(layer: Any) -> str:
        """Name in `tvm_ops.LAYOUTS` of the layer's cache."""
        return LAYOUT

    def write_kv(
        self,
        layer: Any,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write keys and values `[N, kv_heads, head_size]` as vLLM does for this layer."""
        self.do_kv_cache_update(layer, keys, values, cache, slots)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of all rows into `output`; see vLLM's method for the shapes."""
        attend = super().forward
        if not isinstance(attn_metadata, TreeFlashAttentionMetadata) or attn_metadata.trees is None:
            scales = (output_scale, output_block_scale)
            attend(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
            return output
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
            layout=LAYOUT,
            softcap=self.logits_soft_cap or None,
            sliding_window=self.tree_window,
        )
        return output


class TreeFlashAttentionBackend(FlashAttentionBackend):
    """vLLM's flash-attention backend with our metadata and implementation."""

    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttentionImpl]:
        """The implementation class."""
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashAttentionMetadataBuilder]:
        """The metadata builder class."""
        return TreeFlashAttentionMetadataBuilder


def tree_backend() -> AbstractContextManager[None]:
    """While a model is built inside, its layers get `TreeFlashAttentionBackend`.

    The entry `FLASH_ATTN` is what `translate` chooses on CUDA.
    """
    return overridden_backend(
        AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{TreeFlashAttentionBackend.__qualname__}"
    )


def forecast_layout(vllm_config: Any) -> str:
    """The layout that the caches will have, before there are layers to ask."""
    return LAYOUT
