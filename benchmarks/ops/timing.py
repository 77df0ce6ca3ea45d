"""Two calls timed in turn, and what is kept of their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Call = Callable[[], object]
Record = dict[str, object]


@dataclass(frozen=True)
class Repeats:
    """How often a pair is timed: as often as `seconds` allow, within `least` and `most` rounds."""

    seconds: float = 0.6
    least: int = 7
    most: int = 200

    def rounds(self, seconds: float) -> int:
        """Rounds for a pair that takes `seconds` a round."""
        return max(self.least, min(self.most, int(self.seconds / max(seconds, 1e-7))))


def clock(call: Call) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def time_pair(ours: Call, theirs: Call, repeats: Repeats) -> tuple[list[float], list[float]]:
    """Seconds of both, round by round; the order changes from round to round.

    Whoever runs second finds the caches as the first left them, so both do so equally often.
    """
    clock(ours)
    clock(theirs)  # the first calls build plans and touch memory
    own: list[float] = []
    other: list[float] = []
    for index in range(repeats.rounds(clock(ours) + clock(theirs))):
        if index % 2:
            other.append(clock(theirs))
            own.append(clock(ours))
        else:
            own.append(clock(ours))
            other.append(clock(theirs))
    return own, other


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile of at least one value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def compare(own: Sequence[float], other: Sequence[float]) -> Record:
    """What is recorded of a pair: microseconds, and the time of ours over that of theirs.

    ratio: of the medians; below 1, ours is faster. ratio_quartiles: of the ratios of the rounds,
    in which noise that hits a whole round cancels.
    """
    ours, theirs = quartiles(own), quartiles(other)
    low, _, high = quartiles([a / b for a, b in zip(own, other, strict=True)])
    return {
        "rounds": len(own),
        "ours_us": _microseconds(ours[1]),
        "ours_us_quartiles": [_microseconds(ours[0]), _microseconds(ours[2])],
        "theirs_us": _microseconds(theirs[1]),
        "theirs_us_quartiles": [_microseconds(theirs[0]), _microseconds(theirs[2])],
        "ratio": round(ours[1] / theirs[1], 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
    }


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 2)
