"""Look-up branches of a batch, with chances that follow what was right lately."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from medusa_plugin.lookup import (
    MAX_MATCH_LENGTH,
    PRIOR_HIT_RATE,
    LookupBranch,
    LookupIndex,
)
from medusa_plugin.tree.dynamic import Branches
from medusa_plugin.tree.estimate import Evidence

IntArray = npt.NDArray[np.integer]


@dataclass
class _Request:
    """What is known of one request."""

    index: LookupIndex = field(default_factory=LookupIndex)
    evidence: Evidence = field(default_factory=Evidence)
    offer: LookupBranch | None = None
    """Proposed last, not judged yet."""


class LookupSource:
    """Proposes a branch for each request whose last tokens occurred before.

    A branch is judged by the tokens emitted after it, whether it was verified or not, so a source
    that was wrong for long costs nothing and comes back when it is right again.
    """

    PRIOR = 50.0
    """Judgements that `PRIOR_HIT_RATE` counts for, for each number of agreeing tokens."""
    FADE = 0.999
    REQUEST_FADE = 0.97
    REQUEST_PRIOR = 2.0

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        prior = self.PRIOR * np.array(PRIOR_HIT_RATE)
        self._hits: list[float] = prior.tolist()
        self._trials = [self.PRIOR] * (MAX_MATCH_LENGTH + 1)

    def hit_rate(self, agreeing: int) -> float:
        """Chance of the next token where so many agree before it."""
        agreeing = min(agreeing, MAX_MATCH_LENGTH)
        return self._hits[agreeing] / self._trials[agreeing]

    def advance(
        self, request_ids: Sequence[str], committed: Sequence[IntArray], emitted: Sequence[IntArray]
    ) -> None:
        """Judge the branches proposed last and append to the requests' texts.

        Args:
            request_ids: of the batch.
            committed: `[n_i]` each request's text before this step.
            emitted: `[m_i]` what this step added to it.
        """
        for request_id, before, new in zip(request_ids, committed, emitted, strict=True):
            request = self._requests.get(request_id)
            if request is None:
                request = self._requests[request_id] = _Request()
            self._judge(request, new.tolist())
            known = request.index.num_tokens
            text = np.concatenate([before[known:], new]) if known < len(before) else new
            request.index.extend(text.astype(np.int32, copy=False))

    def propose(self, request_ids: Sequence[str], length: int) -> Branches | None:
        """A branch of `length` tokens for each request that has one; None if none has.

        Args:
            request_ids: each was given to `advance`.
            length: at least 1.
        """
        batch = len(request_ids)
        tokens = np.full((batch, length), -1, np.int64)
        probs = np.zeros((batch, length), np.float32)
        rates = np.array([self.hit_rate(n) for n in range(MAX_MATCH_LENGTH + length)])
        found = False
        for i, request_id in enumerate(request_ids):
            request = self._requests[request_id]
            request.offer = branch = request.index.propose(length)
            if branch is None:
                continue
            found = True
            tokens[i] = branch.tokens
            ratio = request.evidence.ratio(self.REQUEST_PRIOR)
            probs[i] = ratio * rates[branch.match_length : branch.match_length + length]
        return Branches(tokens, np.minimum(probs, 1.0, out=probs)) if found else None

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the texts of requests that ended."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def _judge(self, request: _Request, emitted: list[int]) -> None:
        request.evidence.fade(self.REQUEST_FADE)
        offer, request.offer = request.offer, None
        if offer is None:
            return
        for j, (token, right) in enumerate(zip(offer.tokens.tolist(), emitted, strict=False)):
            agreeing = min(offer.match_length + j, MAX_MATCH_LENGTH)
            request.evidence.add(float(token == right), self.hit_rate(agreeing))
            self._hits[agreeing] = self.FADE * self._hits[agreeing] + (token == right)
            self._trials[agreeing] = self.FADE * self._trials[agreeing] + 1
            if token != right:
                break
