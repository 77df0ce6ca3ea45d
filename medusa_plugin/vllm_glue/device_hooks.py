"""The callables of vLLM that we change or borrow on one kind of device; see `hooks`."""

from __future__ import annotations

from medusa_plugin.vllm_glue.hooks import CALLED, Hook

_ATTENTION = "vLLM's backends take masks of token trees"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_FLASH = "vllm.v1.attention.backends.flash_attn"
_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
# Parameters that attention has on every device.
_BUILD = ("self", "common_prefix_len", "common_attn_metadata", "fast_build")
_FORWARD = (
    "self",
    "layer",
    "query",
    "key",
    "value",
    "kv_cache",
    "attn_metadata",
    "output",
    "output_scale",
    "output_block_scale",
)

CPU_HOOKS = (
    Hook(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.init_device",
        ("self",),
        "use our model runner",
        "replaces vLLM's runner afterwards",
        "the runner's class can be configured",
    ),
    Hook(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.compile_or_warm_up_model",
        ("self",),
        "measure what a step costs once the model is ready",
        "measures afterwards",
        "plugins are told when a model is ready",
    ),
    Hook(
        "vllm.v1.worker.cpu_model_runner",
        "CPUModelRunner.load_model",
        ("self", "load_dummy_weights"),
        "build the target with our attention backend",
        "our backend stands in vLLM's place meanwhile",
        "custom backends can be chosen on CPUs",
    ),
    Hook(
        _CPU_ATTENTION,
        "_get_attn_isa",
        ("dtype", "block_size", "head_size", "kv_cache_dtype"),
        "know the cache layout before the weights load, to compile kernels meanwhile",
        CALLED,
        "the layout is part of the configuration",
    ),
    Hook(
        _CPU_ATTENTION,
        "CPUAttentionMetadataBuilder.build",
        _BUILD,
        "metadata that can carry trees",
        "makes vLLM's into ours",
        _ATTENTION,
    ),
    Hook(
        _CPU_ATTENTION,
        "CPUAttentionBackendImpl.forward",
        _FORWARD,
        "tree rows go to tvm_ops.tree_attention",
        "rows of trees; all others go to vLLM's",
        _ATTENTION,
    ),
)
"""Overridden or called by `worker` and `attention`."""

CUDA_HOOKS = (
    Hook(
        "vllm.v1.worker.gpu_worker",
        "Worker._make_model_runner",
        ("self",),
        "use our model runner",
        "makes ours",
        "the runner's class can be configured",
    ),
    Hook(
        "vllm.v1.worker.gpu_worker",
        "Worker.compile_or_warm_up_model",
        ("self",),
        "measure what a step costs once the model is ready",
        "measures afterwards",
        "plugins are told when a model is ready",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.load_model",
        ("self", "load_dummy_weights", "model"),
        "build the target with our attention backend",
        "our backend stands in vLLM's place meanwhile",
        "vLLM keeps CUSTOM for this model alone",
    ),
    Hook(
        _FLASH,
        "FlashAttentionMetadataBuilder.get_cudagraph_support",
        ("cls", "vllm_config", "kv_cache_spec"),
        "attention depends on the trees of the step",
        "never: the model is captured piecewise",
        "trees are part of what graphs capture",
    ),
    Hook(
        _FLASH,
        "FlashAttentionMetadataBuilder.build",
        _BUILD,
        "metadata that can carry trees",
        "makes vLLM's into ours",
        _ATTENTION,
    ),
    Hook(
        _FLASH,
        "FlashAttentionImpl.do_kv_cache_update",
        ("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
        "probe the layout of the caches",
        CALLED,
        "the layout is part of the configuration",
    ),
    Hook(
        _FLASH,
        "FlashAttentionImpl.forward",
        _FORWARD,
        "tree rows go to tvm_ops.tree_attention",
        "rows of trees; all others go to vLLM's",
        _ATTENTION,
    ),
)
"""Overridden or called by `worker_cuda` and `attention_cuda`."""
