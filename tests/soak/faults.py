"""Faults to plant in the product: a fuzzer that does not find them is worth nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler

from medusa_plugin import compact, step
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.vllm_glue import sampling
from medusa_plugin.vllm_glue.model_runner import GrantedTrees, MedusaModelRunner
from medusa_plugin.vllm_glue.sampling import TreeRowSampler
from tests.soak.engines import PLAIN
from tvm_ops import KVCacheGroup


@contextmanager
def _instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _compaction_forgets_a_layer() -> AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def compact_kv(caches: Any, source: Any, destination: Any) -> None:
            original(KVCacheGroup(caches.caches[:1], caches.layout), source, destination)

        return compact_kv

    return _instead(compact, "compact_kv", make)


def _compaction_moves_across_blocks_wrongly() -> AbstractContextManager[None]:
    """Wrong only where source and destination lie in different blocks."""

    def make(original: Any) -> Any:
        def compact_kv(caches: Any, source: Any, destination: Any) -> None:
            same = source // caches.block_size == destination // caches.block_size
            original(caches, source[same], destination[same])

        return compact_kv

    return _instead(compact, "compact_kv", make)


def _path_is_not_in_the_output_while_walking() -> AbstractContextManager[None]:
    return _instead(TreeRowSampler, "_append", lambda _: lambda *_: None)


def _processors_do_not_see_the_path() -> AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def sample_batch(self: Any, rows: Any) -> Any:
            self._outputs_grew = False
            return original(self, rows)

        return sample_batch

    return _instead(TreeRowSampler, "_sample_batch", make)


def _positions_ignore_the_tree() -> AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def tree_positions(self: Any) -> Any:
            rows, _ = original(self)
            linear = [
                self.root_positions[i] + np.arange(self.trees[i].num_rows) for i in self.branching
            ]
            return rows, rows.new_tensor(np.concatenate(linear))

        return tree_positions

    return _instead(GrantedTrees, "tree_positions", make)


def _siblings_see_each_other() -> AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def tree_batch(self: Any, granted: Any, requests: Any) -> Any:
            batch = original(self, granted, requests)
            masks = batch.ancestor_masks.clone()
            for i in range(len(requests)):
                n = int(batch.query_len[i])
                if n > 3:
                    masks[i, n - 1, 0] |= 0b10
            return replace(batch, ancestor_masks=masks)

        return tree_batch

    return _instead(MedusaModelRunner, "_tree_batch", make)


def _ended_walks_go_on_drawing() -> AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def sample_batch(self: Any, rows: Any) -> Any:
            return original(self, {**dict.fromkeys(range(len(self._current)), 0), **rows})

        return sample_batch

    return _instead(TreeRowSampler, "_sample_batch", make)


def _prefill_chunks_draw() -> AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def init(self: Any, *args: Any) -> None:
            original(self, *args[:-1], frozenset())

        return init

    return _instead(TreeRowSampler, "__init__", make)


def _logprobs_of_the_level_before() -> AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def interleave(levels: Any, rows: int) -> Any:
            return original([levels[0], *levels[:-1]], rows)

        return interleave

    return _instead(sampling, "_interleave", make)


def _a_wrong_child_is_followed() -> AbstractContextManager[None]:
    """Only the last node of large trees, and only now and then: its first token decides."""

    def make(original: Any) -> Any:
        def child_with_token(self: Any, row: int, token: int) -> int | None:
            found = original(self, row, token)
            last = self.num_nodes
            if found is None and last > 4 and token % 16 == 3 and self.parents[-1] == row:
                return int(last)
            return found

        return child_with_token

    return _instead(DraftTree, "child_with_token", make)


def _stops_are_seen_at_the_end_of_a_step_only() -> AbstractContextManager[None]:
    """As if the scheduler looked at the last token of a path alone."""

    def make(original: Any) -> Any:
        def update(self: Any, request: Any, new_token_ids: list[int], **kwargs: Any) -> Any:
            check = scheduler.check_stop
            scheduler.check_stop = lambda *_: False
            try:
                head, _ = original(self, request, new_token_ids[:-1], **kwargs)
            finally:
                scheduler.check_stop = check
            tail, stopped = original(self, request, new_token_ids[-1:], **kwargs)
            return head + tail, stopped

        return update

    return _instead(scheduler.Scheduler, "_update_request_with_output", make)


def _greedy_shortcut_ignores_bias() -> AbstractContextManager[None]:
    return _instead(sampling, "_is_idle", lambda _: lambda _: True)


def _compaction_is_off_by_one() -> AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def compact_paths(caches: Any, paths: Any, roots: Any, table: Any) -> None:
            original(caches, paths, [max(root - 1, 0) for root in roots], table)

        return compact_paths

    return _instead(step, "compact", make)


def _blocks_leak_now_and_then() -> AbstractContextManager[None]:
    calls = [0]

    def make(original: Any) -> Any:
        def free(self: Any, request: Any) -> None:
            is_plain = self.block_pool.num_gpu_blocks == PLAIN["num_gpu_blocks_override"]
            calls[0] += not is_plain
            if not is_plain and calls[0] % 40 == 0:
                blocks = self.coordinator.single_type_managers[0].req_to_blocks
                if blocks[request.request_id]:
                    blocks[request.request_id].pop()
            original(self, request)

        return free

    return _instead(KVCacheManager, "free", make)


def _ended_requests_are_remembered() -> AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def update_states(self: Any, scheduler_output: Any) -> Any:
            kept = dict(self._proposed)
            result = original(self, scheduler_output)
            self._proposed.update(kept)
            return result

        return update_states

    return _instead(MedusaModelRunner, "_update_states", make)


def _trees_are_not_compared_with_the_grant() -> AbstractContextManager[None]:
    """A remembered tree is trusted, whatever tokens the scheduler granted."""

    def make(original: Any) -> Any:
        return lambda self, tokens: self.prefix(len(tokens))

    return _instead(DraftTree, "granted", make)


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    function.__name__.strip("_").replace("_", "-"): function
    for function in (
        _compaction_forgets_a_layer,
        _compaction_moves_across_blocks_wrongly,
        _path_is_not_in_the_output_while_walking,
        _processors_do_not_see_the_path,
        _positions_ignore_the_tree,
        _siblings_see_each_other,
        _ended_walks_go_on_drawing,
        _prefill_chunks_draw,
        _logprobs_of_the_level_before,
        _a_wrong_child_is_followed,
        _stops_are_seen_at_the_end_of_a_step_only,
        _greedy_shortcut_ignores_bias,
        _compaction_is_off_by_one,
        _blocks_leak_now_and_then,
        _ended_requests_are_remembered,
        _trees_are_not_compared_with_the_grant,
    )
}
"""Name -> what plants it, as long as one is inside."""
