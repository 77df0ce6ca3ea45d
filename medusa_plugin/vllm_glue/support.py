"""What tree verification does not support yet: refused at start, by name."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

# The group under which vLLM looks for installed processors; its constant lies in a module too heavy
# to import before the host is checked.
LOGITS_PROCESSORS_GROUP = "vllm.logits_processors"


class UnsupportedFeatureError(ValueError):
    """A feature of the engine cannot be combined with Medusa trees; the message names it."""


def require_supported_engine(vllm_config: Any) -> None:
    """Raise `UnsupportedFeatureError` naming every feature of `vllm_config` in the way."""
    found = [
        *_platform(),
        *_cuda(vllm_config),
        *_parallelism(vllm_config),
        *_model(vllm_config.model_config),
        *_cache(vllm_config),
        *_grammars(vllm_config),
        *_budget(vllm_config),
    ]
    if found:
        raise UnsupportedFeatureError(
            "medusa does not support yet: "
            + "; ".join(found)
            + ". Turn this off, or run without speculation."
        )


def custom_processors(model_config: Any) -> list[str]:
    """Custom logits processors of an engine: what they do to a distribution is not known."""
    given = [
        processor if isinstance(processor, str) else processor.__name__
        for processor in model_config.logits_processors or ()
    ]
    return [f"logits processor {name}" for name in (*given, *_installed_processors())]


@functools.cache
def _installed_processors() -> tuple[str, ...]:
    return tuple(entry.value for entry in entry_points(group=LOGITS_PROCESSORS_GROUP))


def _platform() -> Iterator[str]:
    if not current_platform.is_cpu() and not current_platform.is_cuda():
        yield f"platform {current_platform.device_name} (only cpu and cuda)"


def _cuda(vllm_config: Any) -> Iterator[str]:
    if not current_platform.is_cuda():
        return
    backend = vllm_config.attention_config.backend
    if backend not in (None, AttentionBackendEnum.FLASH_ATTN):
        yield f"attention backend {backend.name} (only FLASH_ATTN)"
    if vllm_config.model_config.dtype not in (torch.float16, torch.bfloat16):
        yield f"{vllm_config.model_config.dtype} on a GPU (only float16 and bfloat16)"
    if vllm_config.model_config.enable_sleep_mode:
        yield "sleep mode, whose level 2 drops the heads' weights"


def _parallelism(vllm_config: Any) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "data_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            yield f"{name}={size} (only 1)"
    if parallel.distributed_executor_backend == "external_launcher":
        # There each rank answers for itself, but only the first one knows what was drawn.
        yield "distributed_executor_backend=external_launcher"
    if getattr(parallel, "use_ubatching", False):
        yield "micro-batching (ubatch, dual batch overlap)"


def _model(model_config: Any) -> Iterator[str]:
    if model_config.runner_type != "generate":
        yield f"runner {model_config.runner_type!r} (only generate)"
    if model_config.is_encoder_decoder:
        yield "encoder-decoder models"
    if model_config.is_hybrid or model_config.is_attention_free or model_config.has_inner_state:
        yield "hybrid, Mamba and other models with recurrent state"
    if model_config.is_multimodal_model:
        yield "multimodal models"
    if model_config.uses_mrope:
        yield "M-RoPE positions"
    if model_config.use_mla:
        yield "multi-head latent attention (MLA)"
    other_layers = _layer_types(model_config) - {"full_attention", "sliding_attention"}
    if other_layers:
        yield f"chunked or other attention (layers: {', '.join(sorted(other_layers))})"
    if model_config.enable_prompt_embeds:
        yield "prompt embeddings"


def _layer_types(model_config: Any) -> set[str]:
    return set(getattr(model_config.hf_text_config, "layer_types", None) or ())


def _cache(vllm_config: Any) -> Iterator[str]:
    mixed = _layer_types(vllm_config.model_config) >= {"full_attention", "sliding_attention"}
    if mixed and not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        yield (
            "layers with and without a sliding window in separate KV-cache groups (one group for "
            "all: --disable-hybrid-kv-cache-manager)"
        )
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    model_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if cache_dtype not in ("auto", model_dtype):
        yield f"kv_cache_dtype={cache_dtype} (only that of the model, {model_dtype})"
    if vllm_config.kv_transfer_config is not None:
        yield "KV connectors (kv_transfer_config), which would ship uncompacted KV"


def _grammars(vllm_config: Any) -> Iterator[str]:
    # vLLM itself would refuse each request that it is asked to constrain.
    if vllm_config.structured_outputs_config.backend == "lm-format-enforcer":
        yield (
            "structured-output backend lm-format-enforcer, which takes no drafts (only xgrammar, "
            "guidance and outlines)"
        )


def _budget(vllm_config: Any) -> Iterator[str]:
    # vLLM pads a request whose whole prompt hit the prefix cache to the rows of a full tree. One
    # that never fits is never scheduled, and one that is clipped fails an assertion.
    rows = 1 + vllm_config.speculative_config.num_speculative_tokens
    scheduler = vllm_config.scheduler_config
    for name in (
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "long_prefill_token_threshold",
    ):
        limit = getattr(scheduler, name, None)
        if limit and limit < rows:
            yield f"{name}={limit}, less than the {rows} rows of one tree (at least {rows})"
