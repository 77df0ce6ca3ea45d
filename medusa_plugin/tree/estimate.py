"""How likely a candidate is accepted: the heads' own probabilities, corrected by what happened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HeadCalibration:
    """Platt scaling of one head: P(right) = sigmoid(bias + scale * logit(p)).

    Fitted where the tokens before are right, as they are when a node's turn comes.
    """

    bias: float = 0.0
    scale: float = 1.0


@dataclass
class Evidence:
    """Hits against what was expected, older ones fading."""

    hits: float = 0.0
    expected: float = 0.0

    def ratio(self, prior: float) -> float:
        """Hits per expected hit; `prior` hits as expected are taken for granted."""
        return (self.hits + prior) / (self.expected + prior)

    def fade(self, factor: float) -> None:
        """Let what is known count less."""
        self.hits *= factor
        self.expected *= factor

    def add(self, hits: float, expected: float) -> None:
        """Count a judgement."""
        self.hits += hits
        self.expected += expected


@dataclass(frozen=True)
class _Offer:
    """A request's candidates in a step, to be judged by the tokens emitted since."""

    tokens: Int64Array
    """`[num_heads, k]`."""
    calibrated: FloatArray
    """`[num_heads]` chance that one of them is right, before the corrections learnt here."""
    expected: float
    """The same of the first head for a request like all others."""


@dataclass
class HeadsEstimate:
    """Acceptance estimates of the heads' candidates, learning while it runs.

    The candidates of head h are judged whenever the tokens before were emitted, whether they were
    verified or not: a request whose tree has shrunk to nothing is still judged, so it recovers
    where the heads are evaluated at all. All judgements fade, so one that lost is tried again.

    Args:
        calibration: one per head.
    """

    calibration: Sequence[HeadCalibration]
    _heads: FloatArray = field(init=False)
    _requests: dict[str, Evidence] = field(init=False, default_factory=dict)
    _offers: dict[str, _Offer] = field(init=False, default_factory=dict)

    HEAD_FADE = 0.998
    """Per judgement: a head's record reaches back about 500 of them, over all requests."""
    HEAD_PRIOR = 20.0
    REQUEST_FADE = 0.95
    """Per step: a request's record reaches back about 20."""
    REQUEST_PRIOR = 2.0

    def __post_init__(self) -> None:
        self._heads = np.zeros((2, len(self.calibration)), np.float64)  # hits, expected
        self._bias = np.array([c.bias for c in self.calibration], np.float32)[:, None]
        self._scale = np.array([c.scale for c in self.calibration], np.float32)[:, None]

    def estimate(
        self, request_ids: Sequence[str], tokens: Int64Array, log_probs: FloatArray
    ) -> FloatArray:
        """Log-probability of each candidate where its path is right, at most 0.

        Args:
            request_ids: of the batch.
            tokens: `[batch, num_heads, k]` candidates.
            log_probs: `[batch, num_heads, k]` by the heads.
        """
        # logit(p) = log p - log(1 - p); a certain candidate would be infinite.
        odds = log_probs - np.log1p(-np.exp(np.minimum(log_probs, -1e-6)))
        probs = 1 / (1 + np.exp(-(self._bias + self._scale * odds)))
        calibrated = np.minimum(probs.sum(2), 1)
        ratios = self.head_ratios()
        expected = np.minimum(calibrated[:, 0] * ratios[0], 1)
        for i, request_id in enumerate(request_ids):
            self._offers[request_id] = _Offer(tokens[i], calibrated[i], float(expected[i]))
        probs *= ratios[:, None]
        probs[:, 0] *= self._request_ratios(request_ids)[:, None]
        with np.errstate(divide="ignore"):
            result: FloatArray = np.log(np.minimum(probs, 1))
        return result

    def head_ratios(self) -> FloatArray:
        """`[num_heads]` how many times more often each head is right than it was estimated."""
        hits, expected = self._heads + self.HEAD_PRIOR
        ratios: FloatArray = (hits / expected).astype(np.float32)
        return ratios

    def _request_ratios(self, request_ids: Sequence[str]) -> FloatArray:
        return np.array(
            [
                self._requests.setdefault(request_id, Evidence()).ratio(self.REQUEST_PRIOR)
                for request_id in request_ids
            ],
            np.float32,
        )

    def observe(self, request_ids: Sequence[str], emitted: Sequence[Sequence[int]]) -> None:
        """Judge the candidates of the step before by the tokens emitted since, one per request."""
        for request_id in request_ids:
            if (evidence := self._requests.get(request_id)) is not None:
                evidence.fade(self.REQUEST_FADE)
        judged = [
            (offer, tokens, self._requests[request_id])
            for request_id, tokens in zip(request_ids, emitted, strict=True)
            if (offer := self._offers.pop(request_id, None)) is not None
        ]
        if not judged:
            return
        num_heads = self._heads.shape[1]
        right = np.full((len(judged), num_heads), -1, np.int64)
        for i, (_, tokens, _) in enumerate(judged):
            known = tokens[:num_heads]
            right[i, : len(known)] = known
        calibrated = np.stack([offer.calibrated for offer, _, _ in judged])
        offered = np.stack([offer.tokens for offer, _, _ in judged])
        reached = right >= 0
        hits = (offered == right[:, :, None]).any(2) & reached
        self._heads *= self.HEAD_FADE ** reached.sum(0)
        self._heads += hits.sum(0), (calibrated * reached).sum(0)
        for hit, (offer, _, evidence) in zip(hits[:, 0].tolist(), judged, strict=True):
            evidence.add(hit, offer.expected)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the records of requests that ended."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._offers.pop(request_id, None)


@dataclass
class TreesEstimate:
    """How many of the nodes that were drafted get accepted, against what was expected of them.

    Trees take the most promising candidates, and of estimates with errors the greatest are too
    great; this corrects what is left of it after `HeadsEstimate`.
    """

    FADE = 0.995
    """Per judgement: reaches back about 200 trees."""
    PRIOR = 10.0
    _evidence: Evidence = field(init=False, default_factory=Evidence)
    _expected: dict[str, tuple[int, float]] = field(init=False, default_factory=dict)

    @property
    def ratio(self) -> float:
        """Accepted nodes per node expected to be."""
        return self._evidence.ratio(self.PRIOR)

    def expect(self, request_id: str, num_nodes: int, accepted: float) -> None:
        """Note a tree: of its nodes so many are expected to be accepted, uncorrected."""
        self._expected[request_id] = num_nodes, accepted

    def observe(self, request_id: str, num_nodes: int, accepted: int) -> None:
        """Judge the tree noted last by how many of the nodes verified were accepted."""
        noted = self._expected.pop(request_id, None)
        if noted is not None and noted[0] == num_nodes:  # it was granted as a whole
            self._evidence.fade(self.FADE)
            self._evidence.add(accepted, noted[1])

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is kept for requests that ended."""
        for request_id in request_ids:
            self._expected.pop(request_id, None)
