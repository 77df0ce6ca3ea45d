"""vLLM's scheduler, which masks trees for grammars and ends requests that fail.

**Grammars.** vLLM checks drafts against a grammar, and computes a mask for each of them, as if they
followed each other. Here each path of a tree goes through vLLM's own functions as the chain that it
is, so all that they decide along a chain (backends, rollback, termination, where reasoning ends)
holds along every path. The grammar itself is advanced by vLLM alone, by accepted tokens. Nodes that
the grammar refuses carry no token, so no walk gets there, and their rows allow everything.

**Failures.** Plain vLLM samples from NaN as from numbers, and answers with nonsense. Its attention
for CPUs then carries NaN into whatever requests get the same blocks later. Here such a request ends
with an error, alone.

| vLLM field | our meaning |
|---|---|
| `DraftTokenIds` | `DraftTrees`: with the trees whose masks depend on it |
| `Request.spec_token_ids` | the tree's nodes up to the last allowed one; -1 where refused |
| `GrammarOutput.grammar_bitmask` | one row per tree row, root first |
| `ModelRunnerOutput.num_nans_in_logits[id]` above 0 | the walk of this request failed |
| `RequestStatus.FINISHED_ERROR` | finish reason "error"; status 500 of the server |
| `SchedulerOutput.new_block_ids_to_zero` | blocks that a failed request has left |
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from medusa_plugin.tree.draft_tree import PLACEHOLDER_TOKEN_ID, DraftTree
from medusa_plugin.vllm_glue import hooks, host

logger = logging.getLogger("vllm.medusa")


@dataclass
class DraftTrees(DraftTokenIds):
    """The drafts that a worker hands to the scheduler, with the trees of some requests."""

    trees: list[DraftTree | None]
    """For each request, what it drafted if that has to follow a grammar."""


class MedusaScheduler(Scheduler):
    """vLLM's scheduler with a grammar mask per tree row, and an end for requests that fail.

    Raises:
        UnsupportedHostError: vLLM has changed something that this class overrides or calls.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        host.check_hooks(hooks.SCHEDULER_HOOKS)
        super().__init__(*args, **kwargs)
        self._drafted: dict[str, DraftTree] = {}
        """What requests drafted, up to the last node that their grammar allows; the nodes that it
        refuses carry no token."""
        self._ended_in_step: dict[str, set[int]] = {}
        """Blocks of requests that were aborted while a step with them ran."""
        self._blocks_to_zero: set[int] = set()
        """What failed requests have left; cleaned when another request gets it."""

    def update_draft_token_ids(self, draft_token_ids: DraftTrees) -> None:
        """Take the drafts for the next step, without what the grammars refuse."""
        for request_id in self._drafted.keys() - self.requests.keys():
            del self._drafted[request_id]
        drafts = list(draft_token_ids.draft_token_ids)
        constrained = {}
        for i, (request_id, tree) in enumerate(
            zip(draft_token_ids.req_ids, draft_token_ids.trees, strict=True)
        ):
            self._drafted.pop(request_id, None)
            if tree is not None:
                drafts[i] = []
                constrained[request_id] = tree
        super().update_draft_token_ids(DraftTokenIds(draft_token_ids.req_ids, drafts))
        for request_id, tree in constrained.items():
            request = self.requests.get(request_id)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue  # vLLM expects no draft of it
            drafted = self._constrain(request, tree)
            request.spec_token_ids = drafted.tokens.tolist()
            self._drafted[request_id] = drafted

    def _constrain(self, request: Any, tree: DraftTree) -> DraftTree:
        allowed: set[int] = set()
        params = request.sampling_params
        # Behind its end a grammar takes tokens in a step of their own only (guidance refuses them
        # together with the end), so where text goes on the end has to be a step's last token.
        ends = params.all_stop_token_ids if params.ignore_eos else frozenset()
        for leaf in tree.leaves(range(1, tree.num_rows)):
            path = tree.path(leaf)
            valid = self.structured_output_manager.validate_tokens(request, tree.tokens_of(path))
            valid = list(itertools.takewhile(lambda token: token not in ends, valid))
            allowed.update(path[: len(valid)])
        tree = tree.prefix(max(allowed, default=0))
        # Refused nodes carry no token: where no token is left (the grammar has ended, or another
        # parameter bans what it allows), any may be drawn, and the walk must end with it.
        tokens = [
            token if row in allowed else PLACEHOLDER_TOKEN_ID
            for row, token in enumerate(tree.tokens.tolist(), start=1)
        ]
        return replace(tree, tokens=np.array(tokens, dtype=np.int64))

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """The masks of the step: vLLM's own for roots, and those of nodes row by row."""
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        granted = {}
        for request_id, tokens in scheduled.items():
            drafted = self._drafted.get(request_id)
            tree = drafted.granted(tokens) if drafted is not None else None
            if tree is not None:
                granted[request_id] = tree
        if not granted:
            return super().get_grammar_bitmask(scheduler_output)
        masks = {request_id: self._masks(request_id, tree) for request_id, tree in granted.items()}
        # vLLM lays out the rows of all and fills the roots'; it allows everything at placeholders.
        placeholders = {
            request_id: [PLACEHOLDER_TOKEN_ID] * tree.num_nodes
            for request_id, tree in granted.items()
        }
        output = super().get_grammar_bitmask(
            replace(scheduler_output, scheduled_spec_decode_tokens=scheduled | placeholders)
        )
        ids = output.structured_output_request_ids
        first_rows = _first_rows(
            output.grammar_bitmask, [1 + len(scheduled.get(request_id, ())) for request_id in ids]
        )
        for request_id, first_row in zip(ids, first_rows, strict=True):
            for row, mask in masks.get(request_id, {}).items():
                output.grammar_bitmask[first_row + row] = mask
        acceptable = [
            len(scheduled[request_id]) if request_id in granted else count
            for request_id, count in zip(ids, output.num_acceptable_drafts, strict=True)
        ]
        return replace(output, num_acceptable_drafts=acceptable)

    def _masks(self, request_id: str, tree: DraftTree) -> dict[int, npt.NDArray[np.int32]]:
        """The mask of each allowed row below the root: what may follow its path."""
        masks = {}
        requests = {request_id: self.requests[request_id]}
        for path in _allowed_paths(tree):
            tokens = {request_id: tree.tokens_of(path)}
            chain = self.structured_output_manager.grammar_bitmask(requests, [request_id], tokens)
            for row, mask in zip(path, chain[1:], strict=False):
                # vLLM fills the same memory at every call.
                masks[row] = mask.copy()
        return masks

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule as vLLM does; what failed requests have left is cleaned for who gets it now."""
        output = super().schedule(*args, **kwargs)
        self._ended_in_step = {}
        if self._blocks_to_zero:
            handed_out = self._blocks_to_zero & _new_blocks(output)
            self._blocks_to_zero -= handed_out
            zeroed = handed_out.union(output.new_block_ids_to_zero or ())
            output.new_block_ids_to_zero = sorted(zeroed) or None
        return output

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Any]:
        """Finish as vLLM does. Whether the running step damages the blocks is not yet known."""
        if request_ids is None:
            names = list(self.requests)
        else:
            names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for name in self.requests.keys() & names:
            self._ended_in_step[name] = self._blocks_of(name)
        finished: list[Any] = super().finish_requests(names, finished_status)
        return finished

    def _blocks_of(self, request_id: str) -> set[int]:
        return set(itertools.chain(*self.kv_cache_manager.get_block_ids(request_id)))

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> dict[int, EngineCoreOutputs]:
        """Do as vLLM does, then end the requests that failed in this step.

        What they gained before counts: a request that stopped by it has ended well.
        """
        counts = model_runner_output.num_nans_in_logits or {}
        failed = [name for name, count in counts.items() if count]
        blocks = {
            block
            for name in failed
            for block in self._ended_in_step.get(name) or self._blocks_of(name)
        }
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        # Else the next request with this prefix would fail by the same rows. Not before: vLLM 0.33
        # hashes blocks in this very call.
        self.kv_cache_manager.evict_blocks(blocks)
        for request in self.finish_requests(failed, RequestStatus.FINISHED_ERROR):
            logger.error(
                "request %s ends with an error: the model's logits are NaN or infinite for its "
                "text. The weights may be damaged, or their numbers too large for this dtype",
                request.request_id,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                    num_nans_in_logits=counts[request.request_id],
                )
            )
        # A block that others still read is theirs: they fail by it themselves if it is damaged.
        self._blocks_to_zero |= blocks
        return outputs


def _new_blocks(output: SchedulerOutput) -> set[int]:
    """The blocks that requests get in this step, with those that they share."""
    cached = output.scheduled_cached_reqs.new_block_ids
    groups = [*(new.block_ids for new in output.scheduled_new_reqs), *(new or () for new in cached)]
    return set(itertools.chain.from_iterable(ids for group in groups for ids in group))


def _allowed_paths(tree: DraftTree) -> Iterable[list[int]]:
    """Rows of each path to a row that is allowed while none below it is.

    Below a node that is refused all are.
    """
    allowed = (np.flatnonzero(tree.tokens != PLACEHOLDER_TOKEN_ID) + 1).tolist()
    return map(tree.path, tree.leaves(allowed))


def _first_rows(bitmask: npt.NDArray[np.int32], num_rows: list[int]) -> list[int]:
    """First row of each request, of which `num_rows` are used.

    vLLM 0.32 lists the used rows only; 0.33 gives each request as many as the largest tree has.
    """
    if len(bitmask) == sum(num_rows):
        return [sum(num_rows[:i]) for i in range(len(num_rows))]
    return [i * (len(bitmask) // len(num_rows)) for i in range(len(num_rows))]
