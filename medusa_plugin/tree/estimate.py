"""How likely a candidate is accepted: the heads' own probabilities, corrected by what happened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from medusa_plugin.tree.dynamic import Expansion, FloatArray, Int64Array, Level


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


class Offer(Protocol):
    """A request's candidates in a step, to be judged by the tokens emitted since."""

    @property
    def expected(self) -> float:
        """Chance of the first head for a request like all others."""
        ...

    def along(self, tokens: Sequence[int]) -> tuple[Int64Array, FloatArray]:
        """What was proposed on the path of `tokens`.

        Returns:
            `[h, k]` candidates of the first h heads, those which had their turn on the path, and
            `[h]` the chance that one of a head's is right, before the corrections learnt here.
        """
        ...


@dataclass(frozen=True)
class _IndependentOffer:
    """Of heads that propose the same on every path."""

    tokens: Int64Array
    calibrated: FloatArray
    expected: float

    def along(self, tokens: Sequence[int]) -> tuple[Int64Array, FloatArray]:
        """See `Offer.along`."""
        return self.tokens, self.calibrated


@dataclass(frozen=True)
class LevelOffer:
    """Candidates for the children of w nodes of a level, of all requests."""

    level: Level
    expansion: Expansion
    calibrated: FloatArray
    """`[batch, w]` chance that one of a node's candidates is right, uncorrected."""


@dataclass(frozen=True)
class _GrownOffer:
    """Of heads that read the path: what was proposed at the nodes that were expanded."""

    levels: Sequence[LevelOffer]
    request: int
    """Its place in the batch."""
    expected: float

    def along(self, tokens: Sequence[int]) -> tuple[Int64Array, FloatArray]:
        """See `Offer.along`."""
        column, found = 0, []
        for depth, offer in enumerate(self.levels):
            columns = offer.expansion.columns[self.request]
            if depth:
                if depth > len(tokens):
                    break
                level = offer.level
                same = level.parents[self.request, columns] == column
                same &= level.tokens[self.request, columns] == tokens[depth - 1]
                place = int(same.argmax())
                if not same[place]:
                    break
            else:
                place = 0
            column = int(columns[place])
            found.append((offer.expansion.tokens[self.request, place], place, offer))
        candidates = np.stack([row for row, _, _ in found])
        calibrated = [offer.calibrated[self.request, place] for _, place, offer in found]
        return candidates, np.array(calibrated, np.float32)


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
    _offers: dict[str, Offer] = field(init=False, default_factory=dict)

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
        probs = self._calibrate(log_probs, self._bias, self._scale)
        calibrated = np.minimum(probs.sum(2), 1)
        ratios = self.head_ratios()
        expected = np.minimum(calibrated[:, 0] * ratios[0], 1)
        for i, request_id in enumerate(request_ids):
            self._offers[request_id] = _IndependentOffer(
                tokens[i], calibrated[i], float(expected[i])
            )
        probs *= ratios[:, None]
        probs[:, 0] *= self._request_ratios(request_ids)[:, None]
        return _log_probs(probs)

    def estimate_level(
        self, request_ids: Sequence[str], head: int, log_probs: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """The same for one head at nodes of a level; `offer` has to follow.

        Args:
            request_ids: of the batch.
            head: which proposes.
            log_probs: `[batch, w, k]` of its candidates at w nodes.

        Returns:
            `[batch, w, k]` log-probability of each candidate where its path is right, and
            `[batch, w]` the chance that one of a node's is right, uncorrected.
        """
        probs = self._calibrate(log_probs, self._bias[head], self._scale[head])
        calibrated = np.minimum(probs.sum(2), 1)
        probs *= self.head_ratios()[head]
        if head == 0:
            probs *= self._request_ratios(request_ids)[:, None, None]
        return _log_probs(probs), calibrated

    def offer(self, request_ids: Sequence[str], levels: Sequence[LevelOffer]) -> None:
        """Note what was proposed in this step, level by level."""
        expected = np.minimum(levels[0].calibrated[:, 0] * self.head_ratios()[0], 1)
        for i, request_id in enumerate(request_ids):
            self._offers[request_id] = _GrownOffer(levels, i, float(expected[i]))

    @staticmethod
    def _calibrate(log_probs: FloatArray, bias: FloatArray, scale: FloatArray) -> FloatArray:
        # logit(p) = log p - log(1 - p); a certain candidate would be infinite.
        odds = log_probs - np.log1p(-np.exp(np.minimum(log_probs, -1e-6)))
        with np.errstate(over="ignore"):  # of an impossible candidate: exactly 0
            probs: FloatArray = 1 / (1 + np.exp(-(bias + scale * odds)))
        return probs

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
        calibrated = np.zeros((len(judged), num_heads), np.float32)
        offered: list[Int64Array] = []
        for i, (offer, tokens, _) in enumerate(judged):
            candidates, chances = offer.along(tokens)
            known = tokens[: len(candidates)]
            right[i, : len(known)] = known
            calibrated[i, : len(chances)] = chances
            offered.append(candidates)
        reached = right >= 0
        hits = np.zeros_like(reached)
        for i, candidates in enumerate(offered):
            n = len(candidates)
            hits[i, :n] = (candidates == right[i, :n, None]).any(1) & reached[i, :n]
        self._heads *= self.HEAD_FADE ** reached.sum(0)
        self._heads += hits.sum(0), (calibrated * reached).sum(0)
        for hit, (offer, _, evidence) in zip(hits[:, 0].tolist(), judged, strict=True):
            evidence.add(hit, offer.expected)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the records of requests that ended."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._offers.pop(request_id, None)


def _log_probs(probs: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore"):
        result: FloatArray = np.log(np.minimum(probs, 1))
    return result


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
