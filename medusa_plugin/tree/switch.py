"""Whether drafting pays at all: judged by what steps with it and without it really yielded."""

from __future__ import annotations

from dataclasses import dataclass

from medusa_plugin.tree.budget import FadingMean


class _Yield:
    """Tokens and seconds of the recent steps of a kind; a step counts for 1 / `memory` of them."""

    def __init__(self, memory: float) -> None:
        self.tokens = FadingMean(1 - 1 / memory)
        """Per request."""
        self.seconds = FadingMean(1 - 1 / memory)
        """As a multiple of what a step without nodes is expected to take."""

    @property
    def rate(self) -> float:
        return self.tokens.value / self.seconds.value


@dataclass
class _Record:
    """What is known of drafting under one load."""

    drafted: _Yield
    plain: _Yield
    drafts: bool = True
    """What the steps do now."""
    wins: bool = True
    """Whether drafting did, when last judged."""
    left: int = 0
    """Steps until the other kind has its turn."""
    stay: int = 0
    """Steps that the better kind had without a look at the other."""


class DraftSwitch:
    """Drafts while steps that draft yield more tokens per second than steps that don't.

    Drafting is paid before its result is known, and no model of costs knows all that a tree costs
    on a machine. So both kinds of step are tried, and the one that yielded more goes on; the other
    has a few steps after a stay that doubles each time, up to `MAX_STAY`. Each load (by powers of
    two) is judged by itself: one not met yet is tried at once, one that comes back is remembered.
    """

    MEMORY, LEAST_MEMORY = 64, 8
    """Steps of a lone request that a kind is judged by, of more requests as many fewer: one
    request's gain varies much from step to step. And the least."""
    TRIAL = 4
    """Steps of a look, of which the first is not judged: it drafts but has nothing to verify."""
    FIRST_TRIAL = 12
    """Steps of a lone request's first look; of more requests fewer, since each tells something."""
    FIRST_STAY = 16
    MAX_STAY = 128

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._last: tuple[int, bool] = (0, False)
        """Key in `_records` of the last step's load, and whether it drafted."""
        self._steady = False

    def should_draft(self, load: int) -> bool:
        """Whether to draft in this step for `load` requests; called once a step."""
        key = load.bit_length()
        record = self._records.get(key)
        if record is None:
            memory = max(self.MEMORY / load, self.LEAST_MEMORY)
            first_trial = max(round(self.FIRST_TRIAL / load**0.5), self.TRIAL)
            record = _Record(_Yield(memory), _Yield(memory), left=first_trial)
            self._records[key] = record
        if not record.left:
            self._turn(record)
        record.left -= 1
        self._steady = self._last == (key, record.drafts)
        self._last = (key, record.drafts)
        return record.drafts

    def _turn(self, record: _Record) -> None:
        """Begin a trial of the kind that lost, or go on with the one that wins."""
        if not record.plain.tokens.weight or not record.drafted.tokens.weight:
            record.drafts, record.left = not record.drafts, self.TRIAL
            return
        wins = record.drafted.rate > record.plain.rate
        looked = record.drafts != record.wins
        if wins != record.wins or not record.stay:
            record.wins, record.stay = wins, self.FIRST_STAY
        elif looked:
            record.stay = min(2 * record.stay, self.MAX_STAY)
        if looked or record.drafts != wins:
            record.drafts, record.left = wins, record.stay
        else:
            record.drafts, record.left = not wins, self.TRIAL

    def observe(self, load: int, tokens: int, relative_seconds: float) -> None:
        """Learn from the step that was last asked for.

        Args:
            load: requests.
            tokens: that they gained.
            relative_seconds: its time as a multiple of what a step without nodes is expected to
                take.
        """
        if not self._steady:  # verified what the other kind left, or nothing
            return
        key, drafted = self._last
        record = self._records[key]
        kind = record.drafted if drafted else record.plain
        kind.tokens.add(tokens / load)
        kind.seconds.add(relative_seconds)
