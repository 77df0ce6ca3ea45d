"""CUDA attention backend: tree rows go to `tvm_ops.tree_attention`, others to flash-attention."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
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
from tvm_ops import TreeBatch, TreeTables

LAYOUT = "strided"


@dataclass
class TreeFlashAttentionMetadata(TreeMetadata, FlashAttentionMetadata):
    """vLLM's metadata for the whole batch, and its trees (`TreeTables`)."""


class TreeFlashAttentionMetadataBuilder(TreeMetadataBuilder, FlashAttentionMetadataBuilder):
    """Builds `TreeFlashAttentionMetadata`; the model runner adds the trees of the step."""

    metadata_class = TreeFlashAttentionMetadata
    _tables: TreeTables | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """None: which kernels run depends on the trees of the step. vLLM then captures the model
        piecewise, between the attention layers."""
        return AttentionCGSupport.NEVER

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


class TreeFlashAttentionImpl(TreeImpl, FlashAttentionImpl):
    """Splits the rows of a batch between flash-attention and the tree kernel."""

    @property
    def tree_window(self) -> int | None:
        """See `TreeImpl`."""
        left: int = self.sliding_window[0]
        return left + 1 if left >= 0 else None

    @property
    def has_quantized_cache(self) -> bool:
        """See `TreeImpl`."""
        return bool(is_quantized_kv_cache(self.kv_cache_dtype))

    @staticmethod
    def kv_layout(layer: Any) -> str:
        """See `TreeImpl.kv_layout`."""
        return LAYOUT

    def write_kv(
        self,
        layer: Any,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """See `TreeImpl.write_kv`."""
        self.do_kv_cache_update(layer, keys, values, cache, slots)


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
