"""Every callable of vLLM that we change or borrow on any device, and why; `host` checks them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """One callable of vLLM that we wrap, override or call, with the parameters we rely on."""

    module: str
    qualname: str
    parameters: tuple[str, ...]
    reason: str
    """What we need it for."""
    difference: str
    """What ours does otherwise than vLLM's."""
    removal: str
    """Ours can go when ..."""

    @property
    def name(self) -> str:
        """Dotted name for messages."""
        return f"{self.module}.{self.qualname}"


CALLED = "none: it is called as it is"
TREES = "vLLM verifies token trees"
_FINITE = "vLLM ends requests whose logits are not finite"
_ARGS = "vllm.engine.arg_utils"
_PARAMS = "vllm.sampling_params"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_GRAMMARS = "vllm.v1.structured_output"
_BLOCKS = "vllm.v1.core.kv_cache_manager"
_LORA = "vllm.v1.worker.lora_model_runner_mixin"
_PARALLEL = "vllm.distributed.parallel_state"

REGISTRATION_HOOKS = (
    Hook(
        _ARGS,
        "EngineArgs.create_engine_config",
        ("self", "usage_context", "headless"),
        "translate method 'medusa' into vLLM's own terms",
        "translates the arguments before, checks the finished configuration after",
        "vLLM accepts out-of-tree methods by name",
    ),
    Hook(
        _ARGS,
        "EngineArgs.add_cli_args",
        ("parser",),
        "offer --speculative-model and --medusa-*",
        "adds flags to vLLM's",
        "plugins can declare flags",
    ),
    Hook(
        _ARGS,
        "EngineArgs.from_cli_args",
        ("cls", "args"),
        "read these flags",
        "moves them into speculative_config before",
        "plugins can declare flags",
    ),
    Hook(
        _PARAMS,
        "SamplingParams._validate_spec_decode",
        ("self", "speculative_config"),
        "allow min_p and logit_bias, which the tree walk applies",
        "skipped for Medusa",
        "vLLM allows them with speculation",
    ),
    Hook(
        _PARAMS,
        "SamplingParams.verify",
        ("self", "model_config", "speculative_config", "structured_outputs_config", "tokenizer"),
        "check extra_args['medusa'] in the front end",
        "checks it after vLLM's own checks",
        "plugins can check requests",
    ),
    Hook(
        "vllm.v1.sample.logits_processor",
        "build_logitsprocs",
        ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs"),
        "keep all logits processors, which the tree walk applies",
        "called without the speculative configuration",
        "vLLM keeps them with speculation",
    ),
    Hook(
        "vllm.model_executor.model_loader.default_loader",
        "DefaultModelLoader.get_all_weights",
        ("self", "model_config", "model"),
        "load targets whose own files hold heads too",
        "leaves out tensors medusa_head.* and medusa_heads.*, for Medusa",
        "vLLM passes over tensors that the model does not have",
    ),
)
"""Wrapped in every process by `registration`."""

WORKER_HOOKS = (
    Hook(
        _RUNNER,
        "GPUModelRunner._update_states",
        ("self", "scheduler_output"),
        "forget trees of requests that ended or were preempted",
        "forgets before vLLM updates",
        TREES,
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._prepare_inputs",
        ("self", "scheduler_output", "num_scheduled_tokens"),
        "rotary positions by depth",
        "replaces positions of tree rows after slots were computed from linear ones",
        TREES,
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
        "attaches the trees to what vLLM built",
        TREES,
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.sample_tokens",
        ("self", "grammar_output"),
        "the hidden states of the step are at hand here",
        "keeps them while vLLM samples, and observes the step",
        "vLLM hands hidden states to custom proposers",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._sample",
        ("self", "logits", "spec_decode_metadata"),
        "walk the trees in place of the rejection sampler",
        "replaces vLLM's",
        TREES,
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
        "hides their generators meanwhile; failed walks stand in the place of counts of NaN",
        "vLLM draws nothing for discarded rows",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._input_fits_in_drafter",
        ("self", "common_attn_metadata"),
        "heads have no positions, so they always fit",
        "always true",
        "vLLM asks the proposer",
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
        "replaces vLLM's",
        "vLLM hands hidden states to custom proposers",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.take_draft_token_ids",
        ("self",),
        "send the trees to the scheduler, which masks their rows",
        "adds trees to the drafts",
        TREES,
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.initialize_kv_cache",
        ("self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
        "group the caches for compaction and probe their layout",
        "does so after vLLM allocated them",
        TREES,
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._dummy_run",
        (
            "self",
            "num_tokens",
            "cudagraph_runtime_mode",
            "force_attention",
            "uniform_decode",
            "allow_microbatching",
            "skip_eplb",
            "is_profile",
            "create_mixed_batch",
            "remove_lora",
            "is_graph_capturing",
            "num_active_loras",
            "profile_seq_lens",
            "randomize_inputs",
        ),
        "measure what a forward pass of so many rows takes",
        CALLED,
        "vLLM tells what a step costs",
    ),
    Hook(
        _LORA,
        "LoRAModelRunnerMixin.maybe_select_dummy_loras",
        (
            "self",
            "lora_config",
            "num_scheduled_tokens",
            "mapping_type",
            "num_sampled_tokens",
            "num_active_loras",
        ),
        "measure it with adapters",
        CALLED,
        "vLLM tells what a step costs",
    ),
    Hook(
        _LORA,
        "LoRAModelRunnerMixin.maybe_remove_all_loras",
        ("self", "lora_config"),
        "drop the dummy adapters of the measurement",
        CALLED,
        "vLLM tells what a step costs",
    ),
    Hook(
        _PARALLEL,
        "GroupCoordinator.broadcast_object",
        ("self", "obj", "src"),
        "tell the other tensor-parallel ranks what was accepted and drafted",
        CALLED,
        "vLLM decides on one rank",
    ),
    Hook(
        _PARALLEL,
        "GroupCoordinator.gather",
        ("self", "input_", "dst", "dim"),
        "gather a language-model head that is split between the ranks",
        CALLED,
        "vLLM offers the whole head",
    ),
)
"""Overridden by `model_runner`, or called by `tensor_parallel`, on every device."""

SCHEDULER_HOOKS = (
    Hook(
        _SCHEDULER,
        "Scheduler.update_draft_token_ids",
        ("self", "draft_token_ids"),
        "check every path of a tree against the grammar",
        "a chain's check per path",
        "vLLM's scheduler knows trees",
    ),
    Hook(
        _SCHEDULER,
        "Scheduler.get_grammar_bitmask",
        ("self", "scheduler_output"),
        "mask the rows of trees",
        "replaces the masks of tree rows",
        "vLLM's scheduler knows trees",
    ),
    Hook(
        _GRAMMARS,
        "StructuredOutputManager.validate_tokens",
        ("self", "request", "spec_tokens"),
        "check one path",
        CALLED,
        "vLLM's scheduler knows trees",
    ),
    Hook(
        _GRAMMARS,
        "StructuredOutputManager.grammar_bitmask",
        ("self", "requests", "structured_output_request_ids", "scheduled_spec_decode_tokens"),
        "mask the rows of one path",
        CALLED,
        "vLLM's scheduler knows trees",
    ),
    Hook(
        _SCHEDULER,
        "Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
        "end a request whose logits are not finite with an error",
        "ends it after vLLM's own bookkeeping",
        _FINITE,
    ),
    Hook(
        _SCHEDULER,
        "Scheduler.finish_requests",
        ("self", "request_ids", "finished_status"),
        "end such a request, and know the blocks of one that is aborted while its step runs",
        "notes the blocks before",
        _FINITE,
    ),
    Hook(
        _BLOCKS,
        "KVCacheManager.get_block_ids",
        ("self", "request_id"),
        "know such a request's blocks",
        CALLED,
        _FINITE,
    ),
    Hook(
        _BLOCKS,
        "KVCacheManager.evict_blocks",
        ("self", "block_ids"),
        "forget them in the prefix cache",
        CALLED,
        _FINITE,
    ),
    Hook(
        _SCHEDULER,
        "Scheduler.schedule",
        ("self", "throttle_prefills"),
        "clean the blocks of failed requests before others get them",
        "adds those of their blocks that are handed out to those to zero",
        _FINITE,
    ),
)
"""Overridden or called by `scheduler`."""
