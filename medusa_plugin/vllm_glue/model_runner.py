"""Model runner: vLLM's batch in, `step.decode_step`, vLLM's outputs out.

| vLLM field | our meaning |
|---|---|
| `scheduled_spec_decode_tokens[id]` | granted nodes: a prefix of our tree, or -1 (no tree) |
| last `n + 1` rows of a request (`query_start_loc`) | root row and n node rows |
| `positions` | linear until slots are computed, then root position + depth |
| `logits`, `sample_hidden_states` | `n + 1` rows per request, root first |
| `input_batch.block_table[0]` | physical blocks, for compaction |
| `discard_request_mask` | prefill chunks: no draw, no draft |
| `SamplerOutput.sampled_token_ids` | accepted path and bonus token, padded with -1 |
| `_draft_token_ids` | tokens of the next trees' nodes, in row order; see `scheduler.py` |
| `num_nans_in_logits[id]` = 1 | the walk of this request failed: `scheduler` ends it |
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from medusa_plugin.batch import StepRequest
from medusa_plugin.draft import Drafter
from medusa_plugin.step import AcceptedTokens, StepResult, decode_step, follow_step
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.token_tree import TokenTree
from medusa_plugin.typical import TypicalRule
from medusa_plugin.vllm_glue.attention_rows import TreeImpl
from medusa_plugin.vllm_glue.costs import follow_measurement, step_costs
from medusa_plugin.vllm_glue.kv_cache import group_caches, start_kernels
from medusa_plugin.vllm_glue.request_control import RunningRequests
from medusa_plugin.vllm_glue.sampling import TreeRowSampler, tokens_of
from medusa_plugin.vllm_glue.scheduler import DraftTrees
from medusa_plugin.vllm_glue.support import UnsupportedFeatureError
from medusa_plugin.vllm_glue.tensor_parallel import decides, hear, tell
from medusa_plugin.vllm_glue.translate import medusa_config
from tvm_ops import KVCacheGroup, TreeBatch

logger = logging.getLogger("vllm.medusa")


@dataclass(frozen=True)
class GrantedTrees:
    """The trees that the scheduler granted in a step, in batch order."""

    trees: tuple[DraftTree, ...]
    """One per request; just the root where there is no draft."""
    root_rows: npt.NDArray[np.int64]
    """Row of each request's root in the batch."""
    root_positions: npt.NDArray[np.int64]
    """Position of each request's root in its sequence."""

    @cached_property
    def branching(self) -> list[int]:
        """Requests that need the tree kernel: a chain is ordinary causal attention."""
        return [i for i, tree in enumerate(self.trees) if not tree.is_chain]

    def tree_positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 `[n]` batch rows of the branching trees, and each row's position by its depth."""
        rows, positions = [], []
        for i in self.branching:
            depths = self.trees[i].depths
            rows.append(self.root_rows[i] + np.arange(len(depths)))
            positions.append(self.root_positions[i] + depths)
        return torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(positions))


class MedusaModelRunner(GPUModelRunner):
    """vLLM's model runner that verifies trees; a subclass per device names the attention."""

    tree_attention: ModuleType
    """`attention` or `attention_cuda`."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        config = medusa_config(vllm_config)
        self._typical_rule = TypicalRule(config.typical_epsilon, config.typical_alpha)
        self._running = RunningRequests(config.acceptance)
        self.accepted_tokens = AcceptedTokens()
        self._proposed: dict[str, DraftTree] = {}
        self._granted: GrantedTrees | None = None
        self._hidden_states: torch.Tensor | None = None
        self._sample_hidden_states: torch.Tensor | None = None
        self._result = StepResult([], [], {})
        self._step_started = 0.0
        self.kv_cache_group: KVCacheGroup | None = None

    # Start-up

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the target with our attention backend, and the heads."""
        start_kernels(self.vllm_config, self.tree_attention.forecast_layout(self.vllm_config))
        with self.tree_attention.tree_backend():
            super().load_model(*args, **kwargs)

    def initialize_kv_cache(
        self,
        kv_cache_config: Any,
        is_profiling: bool = False,
        kv_cache_allocation_context: Any = None,
    ) -> None:
        """Allocate as vLLM does, then group the caches and check that we read their layout."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, kv_cache_allocation_context)
        if is_profiling:
            return
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        for layer in layers.values():
            if not isinstance(layer.impl, TreeImpl):
                raise UnsupportedFeatureError(
                    f"medusa does not support yet: {type(layer.impl).__name__} in layer "
                    f"{layer.layer_name}. Run this model without speculation."
                )
        self.kv_cache_group = group_caches(list(layers.values()), kv_cache_config)

    def measure_costs(self) -> None:
        """Tell the drafter what a step costs here, if tree sizes are to follow it."""
        if not self.drafter.sizes_follow_cost:
            return
        if decides():
            self.drafter.drafter.costs = step_costs(self, self.drafter.drafter)
        else:
            follow_measurement(self)

    # Before the forward pass

    def _update_states(self, scheduler_output: Any) -> Any:
        self._step_started = time.perf_counter()
        if scheduler_output.finished_req_ids and decides():
            self.medusa_drafter.forget(scheduler_output.finished_req_ids)
        for request_id in scheduler_output.finished_req_ids:
            self._proposed.pop(request_id, None)
        for request_id in scheduler_output.preempted_req_ids or ():
            self._proposed.pop(request_id, None)
        self._running.forget(scheduler_output.finished_req_ids)
        # A session that streams its input may bring other parameters with each piece.
        self._running.forget(new.req_id for new in scheduler_output.scheduled_new_reqs)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        # Slots come from the linear positions, so vLLM computes them before we change positions.
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        granted = self._grant(scheduler_output.scheduled_spec_decode_tokens)
        if granted.branching:
            rows, positions = granted.tree_positions()
            device = self.positions.device
            self.positions[rows.to(device)] = positions.to(device, self.positions.dtype)
        self._granted = granted
        return prepared

    def _grant(self, scheduled: dict[str, list[int]]) -> GrantedTrees:
        """Match the granted tokens with the trees we proposed."""
        num_requests = self.input_batch.num_reqs
        trees = []
        for request_id in self.input_batch.req_ids[:num_requests]:
            tokens = scheduled.get(request_id, ())
            proposed = self._proposed.get(request_id)
            tree = proposed.granted(tokens) if proposed is not None else None
            # Tokens we did not propose (placeholders) are verified as the chain they are.
            trees.append(tree or DraftTree.on(TokenTree.chain(len(tokens)), tokens))
        ends = self.query_start_loc.np[1 : num_requests + 1].astype(np.int64)
        nodes = np.array([tree.num_nodes for tree in trees], dtype=np.int64)
        seq_lens = self.optimistic_seq_lens_cpu[:num_requests].numpy().astype(np.int64)
        return GrantedTrees(tuple(trees), ends - nodes - 1, seq_lens - nodes - 1)

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._build_attention_metadata(*args, **kwargs)
        granted = self._granted
        if granted is None or not granted.branching:
            return result
        metadata_by_layer = result[0]
        num_requests = len(granted.trees)
        # One call for all that decode: only prefills are left to vLLM's kernel.
        num_rows = np.diff(self.query_start_loc.np[: num_requests + 1])
        decoding = [i for i, tree in enumerate(granted.trees) if tree.num_rows == num_rows[i]]
        plain = [i for i, tree in enumerate(granted.trees) if tree.num_rows != num_rows[i]]
        trees = self._tree_batch(granted, decoding)
        for group in self.attn_groups[0]:
            group.get_metadata_builder(0).attach_trees(
                metadata_by_layer[group.layer_names[0]],
                trees,
                plain,
                self.query_start_loc.np[: num_requests + 1],
            )
        return result

    def _tree_batch(self, granted: GrantedTrees, requests: list[int]) -> TreeBatch:
        trees = [granted.trees[i] for i in requests]
        query_len = np.array([tree.num_rows for tree in trees], dtype=np.int32)
        masks = np.zeros((len(trees), int(query_len.max()), 1), dtype=np.int64)
        for mask, tree in zip(masks, trees, strict=True):
            mask[: tree.num_rows, 0] = tree.masks
        context_len = granted.root_positions[requests].astype(np.int32)
        assert self.kv_cache_group is not None
        width = -(-int((context_len + query_len).max()) // self.kv_cache_group.block_size)
        blocks = self.input_batch.block_table[0].get_numpy_array()[requests, :width]
        return TreeBatch(
            query_start=torch.from_numpy(granted.root_rows[requests].astype(np.int32)),
            query_len=torch.from_numpy(query_len),
            context_len=torch.from_numpy(context_len),
            ancestor_masks=torch.from_numpy(masks),
            block_table=torch.from_numpy(blocks),
        )

    # After the forward pass

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, book-keep and draft as vLLM does, with the step's hidden states at hand."""
        if self.execute_model_state is not None:
            self._hidden_states = self.execute_model_state.hidden_states
            self._sample_hidden_states = self.execute_model_state.sample_hidden_states
        try:
            output: ModelRunnerOutput = super().sample_tokens(grammar_output)
            self._observe_step()
            return output
        finally:
            self._hidden_states = self._sample_hidden_states = None
            self._granted = None
            self._result = StepResult([], [], {})

    def _observe_step(self) -> None:
        """Tell the drafter what the step took, if all it did was to decode."""
        granted = self._granted
        if granted is None or None in self._result.drafts or not decides():
            return
        num_rows = sum(tree.num_rows for tree in granted.trees)
        # More rows than the trees have belong to prefills.
        if num_rows == self.query_start_loc.np[len(granted.trees)]:
            seconds = time.perf_counter() - self._step_started
            num_tokens = sum(len(path.tokens) for path in self._result.paths)
            self.medusa_drafter.observe_step(num_rows, len(granted.trees), num_tokens, seconds)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        granted = self._granted
        assert granted is not None and logits is not None and self.kv_cache_group is not None
        if decides():
            output = self._decide(granted, logits, self.kv_cache_group)
            tell(self._result)
            return output
        self._result = hear()
        follow_step(
            self._result,
            granted.root_positions.tolist(),
            self.kv_cache_group,
            self.input_batch.block_table[0].get_numpy_array(),
        )
        return tokens_of(self._result.paths)

    def _decide(
        self, granted: GrantedTrees, logits: torch.Tensor, caches: KVCacheGroup
    ) -> SamplerOutput:
        """Run the step's stages; sets `_result`."""
        assert self._sample_hidden_states is not None
        num_requests = len(granted.trees)
        discarded = frozenset(np.flatnonzero(self.discard_request_mask.np[:num_requests]).tolist())
        requests = self._step_requests(granted, discarded)
        sampler = TreeRowSampler(
            self.sampler,
            logits,
            [request.first_row for request in requests],
            self.input_batch.sampling_metadata,
            [self.requests[request.request_id].output_token_ids for request in requests],
            discarded,
            self._failed_prefills(granted),
        )
        try:
            result = decode_step(
                requests,
                self._sample_hidden_states,
                logits,
                sampler,
                caches,
                self.input_batch.block_table[0].get_numpy_array(),
                self.medusa_drafter,
                self._typical_rule,
            )
        finally:
            sampler.finish()
        self._result = result
        self.accepted_tokens.count(requests, result.paths)
        for i in sampler.unanswerable:
            params = self.requests[requests[i].request_id].sampling_params
            if params is not None and params.structured_outputs is not None:
                logger.error(
                    "request %s will end with an error: its grammar, allowed_token_ids, bad_words "
                    "and min_tokens together allow no token, so vLLM draws one that they refuse",
                    requests[i].request_id,
                )
        return sampler.output(result.paths)

    def _failed_prefills(self, granted: GrantedTrees) -> frozenset[int]:
        """Batch indices of prefills whose prompt has rows that are not finite.

        They fail at once, even where the last row does not see those (a sliding window): nobody
        looks at the rows later, and they would be left in blocks that others get.
        """
        starts = self.query_start_loc.np[: len(granted.trees) + 1]
        nodes = np.array([tree.num_rows for tree in granted.trees])
        prefills = np.flatnonzero(np.diff(starts) != nodes)
        if not len(prefills):
            return frozenset()
        assert self._hidden_states is not None
        rows = self._hidden_states[: starts[-1]]
        damaged = (~rows.isfinite().all(dim=-1)).cpu().numpy()
        return frozenset(i for i in prefills.tolist() if damaged[starts[i] : starts[i + 1]].any())

    @property
    def medusa_drafter(self) -> Drafter:
        """What proposes the trees, on the rank that decides."""
        drafter: Drafter = self.drafter.drafter
        return drafter

    def _step_requests(self, granted: GrantedTrees, discarded: frozenset[int]) -> list[StepRequest]:
        batch = self.input_batch
        requests = []
        first_row = 0
        for i, (request_id, tree) in enumerate(zip(batch.req_ids, granted.trees, strict=True)):
            state = self.requests[request_id]
            params = state.sampling_params
            assert params is not None  # pooling is refused at start
            settings = self._running.settings(request_id, params)
            requests.append(
                StepRequest(
                    request_id=request_id,
                    tree=tree,
                    first_row=first_row,
                    root_position=int(granted.root_positions[i]),
                    committed=batch.token_ids_cpu[i, : batch.num_tokens_no_spec[i]],
                    drafts_next=i not in discarded,
                    options=settings.options,
                    typical_temperature=settings.typical_temperature,
                )
            )
            first_row += tree.num_rows
        return requests

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM rewinds the generators of discarded requests by one draw; none was made for them,
        # and CPU generators cannot be rewound.
        generators = self.input_batch.generators
        discarded = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
        self.input_batch.generators = {
            i: generator for i, generator in generators.items() if i not in discarded
        }
        try:
            _, *kept = super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators
        # In place of vLLM's own counts of NaN, which take the rows of logits for requests.
        paths = zip(self.input_batch.req_ids, self._result.paths, strict=True)
        failed = {request_id: 1 for request_id, path in paths if path.failed}
        prompt_logprobs = kept[3]
        for request_id in failed:
            # The scheduler takes these only together with a token.
            prompt_logprobs.pop(request_id, None)
        return (failed, *kept)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # Heads have no positions. A False would replace all drafts by zeros that fit no tree.
        return True

    def propose_draft_token_ids(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Hand over the trees of `_sample`, as token lists in row order."""
        drafts: list[list[int]] = []
        for request_id, tree in zip(self.input_batch.req_ids, self._result.drafts, strict=True):
            if tree is None:
                self._proposed.pop(request_id, None)
                drafts.append([])
            else:
                self._proposed[request_id] = tree
                drafts.append(tree.tokens.tolist())
        return drafts

    def take_draft_token_ids(self) -> DraftTrees | None:
        """The drafts for the scheduler, with the trees that it must know to compute masks."""
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        trees = [self._constrained_tree(request_id) for request_id in drafts.req_ids]
        return DraftTrees(drafts.req_ids, drafts.draft_token_ids, trees)

    def _constrained_tree(self, request_id: str) -> DraftTree | None:
        """What a request proposed, if that has to follow a grammar."""
        tree = self._proposed.get(request_id)
        params = self.requests[request_id].sampling_params
        if tree is None or not tree.num_nodes:
            return None
        return tree if params is not None and params.structured_outputs is not None else None
