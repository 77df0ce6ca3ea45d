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


@dataclass(frozen=True)
class StepCosts:
    """What the parts of a decode step cost on this machine."""

    verify: CostCurve
    """Target forward pass and its language-model head, by rows of the whole batch."""
    draft: CostCurve
    """Evaluating the heads, by requests."""
    per_request: float = 0.0
    """Seconds that each request adds (attention to its context, sampling, book-keeping)."""
    per_node: float = 0.0
    """Seconds that each node adds beyond its row in `verify` (attention, its tree)."""

    def step(self, requests: int, nodes: FloatArray) -> FloatArray:
        """Seconds of steps of so many requests and so many nodes in all; drafting is extra."""
        rows = requests + nodes
        result: FloatArray = (
            self.verify.at(rows) + self.per_request * requests + self.per_node * nodes
        )
        return result

    def draft_seconds(self, requests: int) -> float:
        """Seconds of evaluating the heads."""
        return float(self.draft.at(np.array([requests], np.float64))[0])


class CostLearner:
    """Keeps `StepCosts` true while the engine runs.

    What a step took beyond the measured curves is explained by its requests and its nodes: least
    squares over the recent steps. Trees differ from step to step, so both show. Where there were
    no nodes for long the record of them fades, and they are tried again at the measured cost.

    Args:
        costs: as measured at start.
    """

    FADE = 0.98
    """Per step: reaches back about 50."""
    PRIOR = 64.0
    """Squared requests or nodes that the start counts for."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._products = np.zeros((2, 2))
        self._targets = np.zeros(2)

    def observe(self, requests: int, nodes: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            requests: of the batch.
            nodes: verified, of all requests.
            seconds: of the step, drafting left out.
        """
        known = float(self.costs.verify.at(np.array([requests + nodes], np.float64))[0])
        # A hiccup of the machine must not count for more than two steps.
        beyond = min(max(seconds - known, 0.0), 2 * known)
        amounts = np.array([requests, nodes], np.float64)
        self._products = self.FADE * self._products + np.outer(amounts, amounts)
        self._targets = self.FADE * self._targets + beyond * amounts
        per_request, per_node = np.linalg.solve(
            self._products + self.PRIOR * np.eye(2), self._targets
        ).tolist()
        self.costs = replace(
            self.costs, per_request=max(per_request, 0.0), per_node=max(per_node, 0.0)
        )


@dataclass(frozen=True)
class Sizes:
    """The sizes chosen and what is expected of them."""

    nodes: Int64Array
    """`[batch]` nodes of each request."""
    gain: float
    """Expected tokens per second over those of the same step without any node; at least 1."""


def choose_sizes(probs: FloatArray, limits: Int64Array, costs: StepCosts, max_nodes: int) -> Sizes:
    """Sizes that maximise the expected tokens per second of the next step.

    A step yields one token per request and, in expectation, the sum of its nodes' probabilities.
    Nodes are added most probable first over all requests, so each tree is a prefix of its own
    ranking; of all counts the one with the most tokens per second is taken. What drafting cost
    is spent when this is asked, so it does not count.

    Args:
        probs: `[batch, n]` of the requests' ranked nodes, falling along each row.
        limits: `[batch]` nodes that a request may have at most.
        costs: of a step.
        max_nodes: nodes that fit the scheduler's budget for the batch.
    """
    batch, n = probs.shape
    allowed = np.where(np.arange(n) < limits[:, None], probs, 0.0).ravel()
    # Stable, so that equal values of one request keep their order.
    order = np.argsort(-allowed, kind="stable")[: max(0, max_nodes)]
    order = order[allowed[order] > 0]
    tokens = batch + np.concatenate([[0.0], np.cumsum(allowed[order], dtype=np.float64)])
    rates = tokens / costs.step(batch, np.arange(len(tokens), dtype=np.float64))
    best = int(np.argmax(rates))
    nodes = np.bincount(order[:best] // n, minlength=batch) if n else np.zeros(batch, np.int64)
    return Sizes(nodes.astype(np.int64), float(rates[best] / rates[0]))


class DraftSwitch:
    """Whether drafting pays: off when it does not, on again now and then to look.

    Drafting is paid before its result is known. While its expected gain, averaged over steps, does
    not cover its cost, it is skipped for a pause that doubles with each further look, up to
    `MAX_PAUSE` steps. When the load has fallen it looks at once.
    """

    MEMORY = 8
    """Steps that the average reaches back: a single step's candidates may be poor."""
    MAX_PAUSE = 64

    def __init__(self) -> None:
        self._advantage: float | None = None
        self._pause = 0
        self._left = 0
        self._load = 0

    def should_draft(self, load: int) -> bool:
        """Whether to draft in this step for `load` requests; called once a step."""
        if load < self._load:
            self._advantage, self._pause, self._left = None, 0, 0
        self._load = load
        if self._left:
            self._left -= 1
            return False
        return True

    def judge(self, gain: float, cost: float) -> None:
        """Learn from a drafted step.

        Args:
            gain: `Sizes.gain`.
            cost: time of drafting as a share of a step without nodes.
        """
        advantage = gain - 1.0 - cost
        if self._advantage is None:  # the first step alone must not decide
            self._advantage = max(advantage, cost)
        self._advantage += (advantage - self._advantage) / self.MEMORY
        if self._advantage >= 0:
            self._pause = 0
        elif advantage > 0:  # things may have changed: look again soon
            self._pause = 1
        else:
            self._pause = min(max(1, 2 * self._pause), self.MAX_PAUSE)
        self._left = self._pause
