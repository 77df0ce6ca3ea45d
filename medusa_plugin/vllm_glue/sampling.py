"""The host's sampler as a `TargetSampler`: vLLM's full pipeline at each row the walk visits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    LogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.tree.draft_tree import PLACEHOLDER_TOKEN_ID

NOT_FINITE = -2
"""In place of a token drawn from logits that hold NaN or infinity."""


class TreeRowSampler:
    """Draws target tokens level by level for one step.

    The whole batch goes through the sampler once per level, since vLLM's processors address rows
    by batch index; requests whose walk has ended repeat their last row, draw from no generator
    of their own, and the result is dropped.

    Args:
        sampler: vLLM's sampler.
        logits: `[num_rows, vocab]` of the step.
        first_rows: root row of each request in `logits`.
        metadata: the batch's sampling metadata.
        outputs: each request's output token ids, the very lists that vLLM's processors hold. They
            are extended while walking, so that penalties, bad words and minimum lengths see the
            path, and `finish` takes that back.
        discarded: batch indices whose token is thrown away (prefill chunks): their generators are
            not advanced.
        failed: batch indices whose walk fails at once, since the prompt rows of the step are not
            all finite.
    """

    def __init__(
        self,
        sampler: Sampler,
        logits: torch.Tensor,
        first_rows: Sequence[int],
        metadata: SamplingMetadata,
        outputs: Sequence[list[int]],
        discarded: frozenset[int],
        failed: frozenset[int] = frozenset(),
    ) -> None:
        self._sampler = sampler
        self._logits = logits
        self._first_rows = np.asarray(first_rows, dtype=np.int64)
        self._current = self._first_rows.copy()
        self._metadata = replace(metadata, spec_token_ids=None)
        if metadata.thinking_budget_state_holder is not None:
            # One row per request, as without speculation; otherwise it counts rows by drafts.
            metadata.thinking_budget_state_holder.in_spec_mode = False
        self._outputs = outputs
        self._lengths = [len(output) for output in outputs]
        self._discarded = discarded
        self._failed = failed
        self.unanswerable: set[int] = set()
        """Batch indices of requests that allowed no token at a row; vLLM draws an arbitrary one."""
        self._outputs_grew = False
        self._logprobs: list[LogprobsTensors] = []
        self._greedy_only = _is_plain_greedy(metadata)

    def follow(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """See `TargetSampler.follow`."""
        for request, path in tokens.items():
            self._append(request, path)

    def sample(self, rows: Mapping[int, int]) -> dict[int, int | None]:
        """See `TargetSampler.sample`."""
        requests = list(rows)
        self._current[requests] = self._first_rows[requests] + list(rows.values())
        if self._greedy_only:
            # Ended walks need no repeat here: argmax has no state addressed by batch index.
            logits = self._logits
            if len(requests) < len(logits):  # else there are only roots, and all are asked for
                logits = logits[torch.from_numpy(self._current[requests])]
            best = Sampler.greedy_sample(logits.to(torch.float32))
            # To argmax NaN is the largest number, so the winner tells whether there is one.
            highest = logits.gather(-1, best.unsqueeze(-1)).squeeze(-1)
            drawn: list[int] = best.where(highest < torch.inf, NOT_FINITE).tolist()
            nothing_left: list[bool] = (highest == -torch.inf).tolist()
        else:
            drawn, nothing_left = self._sample_batch(rows)
            drawn = [drawn[request] for request in requests]
            nothing_left = [nothing_left[request] for request in requests]
        self.unanswerable.update(set(itertools.compress(requests, nothing_left)) - self._discarded)
        result: dict[int, int | None] = {}
        for request, token in zip(requests, drawn, strict=True):
            if token == NOT_FINITE or request in self._failed:
                result[request] = None
                continue
            result[request] = token
            # A discarded token never becomes output: what watches the output must not see it.
            if request not in self._discarded:
                self._append(request, (token,))
        return result

    def _append(self, request: int, tokens: Sequence[int]) -> None:
        self._outputs[request].extend(tokens)
        self._outputs_grew = True

    def _sample_batch(self, rows: Mapping[int, int]) -> tuple[list[int], list[bool]]:
        """The whole batch's tokens, and whether there was none to draw from."""
        if self._outputs_grew:
            # As at the start of a plain step: the outputs that processors watch have grown.
            for processor in self._metadata.logitsprocs.all:
                processor.update_state(None)
            self._outputs_grew = False
        generators = {
            request: generator
            for request, generator in self._metadata.generators.items()
            if request in rows and request not in self._discarded
        }
        # Indexing copies, which matters: the sampler works in place, on float32.
        logits = self._logits[torch.from_numpy(self._current)].to(torch.float32)
        # NaN and infinity are the model's own, but -inf rules a token out.
        sound = logits.amax(-1) < torch.inf
        result = self._sampler(
            logits=logits, sampling_metadata=replace(self._metadata, generators=generators)
        )
        if result.logprobs_tensors is not None:
            self._logprobs.append(result.logprobs_tensors)
        drawn = result.sampled_token_ids
        nothing_left = logits.gather(-1, drawn.long()).squeeze(-1) == -torch.inf
        return drawn.squeeze(-1).where(sound, NOT_FINITE).tolist(), nothing_left.tolist()

    def finish(self) -> None:
        """Take back what was appended to the output token ids: vLLM's bookkeeping appends it."""
        for output, length in zip(self._outputs, self._lengths, strict=True):
            del output[length:]

    def output(self, paths: Sequence[AcceptedPath]) -> SamplerOutput:
        """What vLLM expects of its rejection sampler.

        Returns:
            `tokens_of` the paths, and logprobs of every entry, flattened in the same order
            (entries of padding are dropped by vLLM).
        """
        output = tokens_of(paths)
        if self._logprobs:
            longest = output.sampled_token_ids.shape[1]
            output.logprobs_tensors = _interleave(self._logprobs, longest)
        return output


def tokens_of(paths: Sequence[AcceptedPath]) -> SamplerOutput:
    """The tokens of all paths, int32 `[num_reqs, longest]` padded with -1; no logprobs."""
    longest = max(len(path.tokens) for path in paths)
    if any(path.failed for path in paths):
        longest = max(longest, 2)  # vLLM looks for padding only where there are two columns
    padded = [
        (*path.tokens, *[PLACEHOLDER_TOKEN_ID] * (longest - len(path.tokens))) for path in paths
    ]
    return SamplerOutput(torch.tensor(padded, dtype=torch.int32), logprobs_tensors=None)


def _is_plain_greedy(metadata: SamplingMetadata) -> bool:
    """Whether argmax of the raw logits is all that the sampler would do."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.all_greedy
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and metadata.no_penalties
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and all(_is_idle(p) for p in metadata.logitsprocs.non_argmax_invariant)
        and (holder is None or not holder.has_tracked_requests())
    )


def _is_idle(processor: LogitsProcessor) -> bool:
    """Whether a processor has no request to act on; of others than vLLM's own nothing is known."""
    if type(processor) is MinTokensLogitsProcessor:
        return not processor.min_toks
    if type(processor) is LogitBiasLogitsProcessor:
        return not processor.biases
    return False


def _interleave(levels: Sequence[LogprobsTensors], rows: int) -> LogprobsTensors:
    """Level-major logprobs (`[num_reqs, k]` per level) to `rows` request-major rows per request.

    A path that was followed without draws has no logprobs and may be longer than any that was
    drawn; its request asked for none, so the last level fills the gap.
    """
    levels = [*levels, *[levels[-1]] * (rows - len(levels))]
    return LogprobsTensors(
        *(
            torch.stack([level[field] for level in levels], dim=1).flatten(0, 1)
            for field in range(3)
        )
    )
