"""Recording: what the heads proposed at every token of an answer, and what came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.batch import StepRequest
from medusa_plugin.draft import TreeDrafter
from medusa_plugin.growth import propose_along
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.dynamic import FloatArray, Int64Array

MIN_LOOP_REPEATS = 3
MIN_LOOP_TOKENS = 12


@dataclass(frozen=True)
class Answer:
    """A greedy answer of n tokens and the heads' candidates after each of them."""

    tokens: Int64Array
    """`[n]`."""
    candidates: Int64Array
    """`[n, num_heads, k]` best first; head h after token i proposes token i + 1 + h."""
    log_probs: FloatArray
    """`[n, num_heads, k]` by the heads, natural logarithm."""

    hidden: torch.Tensor | None = None
    """`[n, hidden_size]` from which the target chose each token; needed to grow trees that read
    the path."""

    def cut(self, length: int) -> Answer:
        """The first `length` tokens."""
        hidden = None if self.hidden is None else self.hidden[:length]
        return Answer(
            self.tokens[:length], self.candidates[:length], self.log_probs[:length], hidden
        )


class RecordingDrafter(TreeDrafter):
    """Drafts nothing and keeps every hidden state, from which the heads are evaluated at the end.

    So every token of an answer is a root once, whatever tree would have been drafted before it.
    """

    answers: list[Answer]
    """What is kept of the last recording, for whoever asks."""

    def record(self, top_k: int) -> None:
        """Start anew, with `top_k` candidates a head."""
        self.answers = []
        self._top_k = min(top_k, self.heads.max_top_k)
        self._recorded: dict[str, list[torch.Tensor]] = {}

    def draft(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> list[DraftTree]:
        """See `Drafter.draft`."""
        for request, hidden in zip(requests, hidden_states.clone(), strict=True):
            self._recorded.setdefault(request.request_id, []).append(hidden)
        return [DraftTree.root_only()] * len(requests)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nothing: records are taken after their requests have ended."""

    def take(self, request_id: str, tokens: Sequence[int]) -> Answer:
        """The record of a request that answered `tokens`."""
        # The host may run a step past the end, never one less; the last token may lack its step.
        steps = self._recorded.pop(request_id)
        length = min(len(steps), len(tokens))
        kept = torch.tensor(tokens[:length], dtype=torch.int64)
        hidden = torch.stack(steps[:length])
        candidates, log_probs = propose_along(
            self.heads, hidden, kept.to(hidden.device), self._top_k
        )
        return Answer(kept.numpy(), candidates, log_probs, hidden)


def loop_start(tokens: npt.NDArray[np.integer]) -> int:
    """Where a text begins to repeat itself to no end; its length where it does not.

    A loop is a piece of text at least three times in a row, together at least 12 tokens. Its first
    occurrence counts as text.
    """
    n = len(tokens)
    first = n
    for period in range(1, n // MIN_LOOP_REPEATS + 1):
        wanted = max((MIN_LOOP_REPEATS - 1) * period, MIN_LOOP_TOKENS - period)
        same = np.concatenate([[0], np.cumsum(tokens[period:] == tokens[:-period])])
        runs = np.flatnonzero(same[wanted:] - same[:-wanted] == wanted)
        if len(runs):
            first = min(first, int(runs[0]) + period)
    return first
