"""How many nodes each request's tree gets: as many as the whole batch gains speed from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a piece of work by its number of rows: measured points, linear between them.

    Raises:
        ValueError: there are no points, or rows do not ascend.
    """

    rows: tuple[int, ...]
    """Ascending."""
    seconds: tuple[float, ...]
    """As measured. Noise must not make a larger step look cheaper: `at` never falls."""

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if not self.rows or len(self.rows) != len(self.seconds) or not ascending:
            raise ValueError(
                f"a cost curve needs one time for each of its ascending row counts, got "
                f"{self.rows} and {self.seconds}"
            )

    @cached_property
    def _points(self) -> tuple[FloatArray, FloatArray, float]:
        rows, seconds = np.array(self.rows, float), np.maximum.accumulate(self.seconds)
        # The last half gives the slope beyond: two neighbours would give noise.
        middle = (len(rows) - 1) // 2
        steep = len(rows) > 1
        slope = (seconds[-1] - seconds[middle]) / (rows[-1] - rows[middle]) if steep else 0.0
        return rows, seconds, float(slope)

    @property
    def noise(self) -> float:
        """How many times longer a point took than one of more rows, at most; 1 for a clean one."""
        rest = np.minimum.accumulate(self.seconds[::-1])[::-1]
        return float((np.array(self.seconds) / rest).max())

    def at(self, rows: FloatArray) -> FloatArray:
        """Seconds for these row counts; beyond the last point the slope goes on."""
        known, seconds, slope = self._points
        inside = np.interp(rows, known, seconds)
        result: FloatArray = inside + np.maximum(rows - known[-1], 0) * slope
        return result

    def at_count(self, rows: int) -> float:
        """Seconds for one row count, remembered: every step asks for the same few."""
        known = self._by_count.get(rows)
        if known is None:
            known = self._by_count[rows] = float(self.at(np.array([rows], np.float64))[0])
        return known

    @cached_property
    def _by_count(self) -> dict[int, float]:
        return {}


@dataclass
class FadingMean:
    """Mean of which older entries fade."""

    fade: float
    """Per entry."""
    weight: float = 0.0
    """Of what it knows, in entries."""
    value: float = 0.0

    def add(self, value: float) -> None:
        """Count an entry."""
        self.weight = self.fade * self.weight + 1
        self.value += (value - self.value) / self.weight

    def restart(self) -> None:
        """Let the next entry stand alone."""
        self.weight = 0.0


@dataclass(frozen=True)
class StepCosts:
    """What the parts of a decode step cost on this machine."""

    verify: CostCurve
    """Target forward pass and its language-model head, by rows of the whole batch."""
    draft: CostCurve
    """Evaluating the heads and ranking their candidates, by requests."""
    per_request: float = 0.0
    """Seconds that each request adds (attention to its context, sampling, book-keeping)."""
    per_node: float = 0.0
    """Seconds that each node adds beyond its row in `verify` (attention, its tree)."""
    per_request_with_trees: float = 0.0
    """Seconds that each request adds besides as soon as there is any node in the batch."""

    def step(self, requests: int, nodes: FloatArray) -> FloatArray:
        """Seconds of steps of so many requests and so many nodes in all; drafting is extra."""
        per_request = self.per_request + self.per_request_with_trees * (nodes > 0)
        rows = requests + nodes
        result: FloatArray = self.verify.at(rows) + per_request * requests + self.per_node * nodes
        return result

    def draft_seconds(self, requests: int) -> float:
        """Seconds of drafting for so many."""
        return self.draft.at_count(requests)


class CostLearner:
    """Keeps `StepCosts` true while the engine runs.

    What a step took beyond the measured curves is spread over its requests; what of that varies
    with their nodes is put down to the nodes: least squares over the recent steps of a like load,
    since between loads much else differs. Trees differ from step to step, so their cost shows;
    while there are none, what was known of it stays.

    Args:
        costs: as measured at start.
    """

    FADE = 0.98
    """Per step: reaches back about 50."""
    PRIOR = 8.0
    """Squared nodes per request that the cost of a node known at start counts for."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._start_per_node = costs.per_node
        self._load = 0
        self._plain = FadingMean(self.FADE)
        """Seconds beyond the curves per request, in steps without nodes."""
        self._nodes = FadingMean(self.FADE)
        """Nodes per request, and what such steps took beyond the curves."""
        self._beyond = FadingMean(self.FADE)
        self._variance = 0.0
        self._covariance = 0.0

    def observe(self, requests: int, nodes: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            requests: of the batch.
            nodes: verified, of all requests.
            seconds: of the step, drafting left out.
        """
        if requests.bit_length() != self._load:
            self._load = requests.bit_length()
            for mean in (self._plain, self._nodes, self._beyond):
                mean.restart()
        known = self.costs.verify.at_count(requests + nodes)
        # A hiccup of the machine must not count for more than two steps.
        beyond = min(seconds - known, 2 * known) / requests
        if nodes:
            self._add(nodes / requests, beyond)
        else:
            self._plain.add(beyond)
        spread = self._variance + self.PRIOR
        per_node = (self._covariance + self.PRIOR * self._start_per_node) / spread
        per_node = max(per_node, 0.0)
        with_trees = self._beyond.value - per_node * self._nodes.value
        per_request = max(self._plain.value if self._plain.weight else with_trees, 0.0)
        self.costs = replace(self.costs, per_request=per_request, per_node=per_node)
        if self._beyond.weight:
            more = max(with_trees - per_request, 0.0)
            self.costs = replace(self.costs, per_request_with_trees=more)

    def _add(self, nodes: float, beyond: float) -> None:
        off, off_beyond = nodes - self._nodes.value, beyond - self._beyond.value
        self._nodes.add(nodes)
        self._beyond.add(beyond)
        # Around the means from before and after: nothing from the first step of a load.
        rest = 1 - 1 / self._nodes.weight
        self._variance = self.FADE * self._variance + rest * off * off
        self._covariance = self.FADE * self._covariance + rest * off * off_beyond


def choose_sizes(
    probs: FloatArray,
    limits: Int64Array,
    costs: StepCosts,
    max_nodes: int,
    spent: float = 0.0,
) -> Int64Array:
    """Sizes that maximise the expected tokens per second of the next step.

    A step yields one token per request and, in expectation, the sum of its nodes' probabilities.
    Nodes are added most probable first over all requests, so each tree is a prefix of its own
    ranking; of all counts the one with the most tokens per second is taken. Time already spent on
    the step counts: the longer a step takes anyway, the more a token in it is worth.

    Args:
        probs: `[batch, n]` of the requests' ranked nodes, falling along each row.
        limits: `[batch]` nodes that a request may have at most.
        costs: of a step.
        max_nodes: nodes that fit the scheduler's budget for the batch.
        spent: seconds that drafting took.

    Returns:
        `[batch]` nodes of each request.
    """
    batch, n = probs.shape
    allowed = np.where(np.arange(n) < limits[:, None], probs, 0.0).ravel()
    # Stable, so that equal values of one request keep their order.
    order = np.argsort(-allowed, kind="stable")[: max(0, max_nodes)]
    order = order[allowed[order] > 0]
    tokens = batch + np.concatenate([[0.0], np.cumsum(allowed[order], dtype=np.float64)])
    seconds = costs.step(batch, np.arange(len(tokens), dtype=np.float64))
    rates = tokens / (seconds + spent)
    best = int(np.argmax(rates))
    nodes = np.bincount(order[:best] // n, minlength=batch) if n else np.zeros(batch, np.int64)
    return nodes.astype(np.int64)
