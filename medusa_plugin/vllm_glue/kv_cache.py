"""KV caches of all layers, grouped for compaction after their layout was checked."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from medusa_plugin.vllm_glue.support import UnsupportedFeatureError
from tvm_ops import KVCacheGroup, check_layout, start_warm_up, warm_up

logger = logging.getLogger("vllm.medusa")


def start_kernels(vllm_config: Any, layout: str) -> None:
    """Begin to compile missing kernels while the weights load; `group_caches` waits for them.

    Args:
        vllm_config: vLLM's configuration.
        layout: forecast of the caches' layout. `group_caches` decides, from the allocated caches,
            and refuses what we do not support.
    """
    model = vllm_config.model_config
    try:
        start_warm_up(layout, model.dtype, model.get_head_size())
    except (TypeError, ValueError) as error:
        logger.debug("no kernels are compiled ahead: %s", error)


def group_caches(layers: list[Any], kv_cache_config: Any) -> KVCacheGroup:
    """Group the caches of `layers` and make the kernels for them ready.

    Args:
        layers: vLLM's attention layers, caches bound.
        kv_cache_config: vLLM's cache configuration.

    Raises:
        UnsupportedFeatureError: the layers do not share one kind of cache.
        LayoutError: vLLM writes a layout that we do not read.
    """
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise UnsupportedFeatureError(
            f"medusa does not support yet: {len(kv_cache_config.kv_cache_groups)} KV cache groups "
            "(only models whose layers share one). Run this model without speculation."
        )
    layouts = {layer.impl.kv_layout(layer) for layer in layers}
    if len(layouts) != 1:
        raise UnsupportedFeatureError(
            f"medusa does not support yet: layers with different cache layouts {sorted(layouts)}"
        )
    layout = layouts.pop()
    group = KVCacheGroup([layer.kv_cache for layer in layers], layout)
    logical_block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    if logical_block_size != group.block_size:
        raise UnsupportedFeatureError(
            f"medusa does not support yet: a block table in blocks of {logical_block_size} tokens "
            f"over caches in blocks of {group.block_size}. Set --block-size {group.block_size}."
        )
    started = time.perf_counter()

    def write(*tensors: torch.Tensor) -> None:
        layers[0].impl.write_kv(layers[0], *tensors)

    dtype, device = group.caches[0].dtype, group.caches[0].device
    check_layout(
        write,
        layout,
        dtype,
        head_dim=group.head_dim,
        block_size=group.block_size,
        device=device,
    )
    warm_up(layout, dtype, group.head_dim)
    logger.info(
        "medusa kernels ready in %.1f s: layout %s, %s, head_dim %d, block_size %d",
        time.perf_counter() - started,
        layout,
        dtype,
        group.head_dim,
        group.block_size,
    )
    return group
