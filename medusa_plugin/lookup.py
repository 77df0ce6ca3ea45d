"""Prompt look-up: what followed the last tokens the last time they were in the text.

A second source of candidates beside the heads, free of any model: answers that quote, edit or
summarise their prompt, code and loops repeat what is already there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_MATCH_LENGTH = 16
"""Agreeing tokens are counted up to here: more no longer change the odds."""

PRIOR_HIT_RATE = (
    # Where a tokens agree with the source, matched before the branch or right on it, entry a is
    # how often the next one is right too. Measured on 1,194 conversations that
    # SmolLM2-135M-Instruct held with itself (207,000 places, greedy, min_ngram 1, max_ngram 5);
    # 24 questions and editing tasks agreed within their noise. How the tokens divide into match
    # and branch makes no difference. A model that repeats itself less hits less often.
    *(0.0, 0.19, 0.52, 0.59, 0.72, 0.75, 0.79, 0.82, 0.83),
    *(0.85, 0.88, 0.89, 0.89, 0.89, 0.89, 0.89, 0.94),
)
"""Chance that token j (from 0) of a branch is right if those before it are: the entry at
`min(match_length + j, MAX_MATCH_LENGTH)`. A guess to start from until a request has its own."""

_POSITION_BITS = 24
_POSITION_MASK = (1 << _POSITION_BITS) - 1
_HASH_MASK = (1 << 63) - 1 - _POSITION_MASK

MAX_TEXT_LENGTH = 1 << _POSITION_BITS
"""Tokens that one index can hold."""

# Tokens whose n-grams wait to be merged: at least the one, and this share of those merged before,
# so that a merge is paid by the tokens it adds.
_MIN_PENDING = 256
_PENDING_SHARE = 16


@dataclass(frozen=True, eq=False)
class LookupBranch:
    """A continuation found in the text."""

    tokens: npt.NDArray[np.int32]
    """`[n]`: the tokens proposed to come next, in order."""
    match_length: int
    """How many of the last tokens of the text agree with those before the continuation's source,
    at most `MAX_MATCH_LENGTH`: the longer, the likelier the continuation."""


class LookupIndex:
    """Index of the n-grams of one request's text, prompt and committed output.

    Text is only ever appended: after a truncation, make a new index. A look-up takes at most one
    probe per n-gram length, whatever the length of the text. Memory with the defaults: 37 bytes
    per token of a prompt (8 of them for each n-gram length), at most 60 per token once the text
    has grown to thousands of tokens, 300 per token of a text of less than 256.

    Each n-gram is an integer: a hash in the high bits, the position of its last token in the low
    ones. Most of them lie in one sorted array, where the most recent position of a hash is a
    binary search away; those of the newest tokens are in a dict until it is worth merging them.

    Args:
        min_ngram: least number of last tokens that must occur earlier for a proposal.
        max_ngram: an occurrence that shares this many tokens wins against any other that is
            older; of shorter ones the longest, then the most recent wins.

    Raises:
        ValueError: the lengths are not `1 <= min_ngram <= max_ngram <= MAX_MATCH_LENGTH`.
    """

    def __init__(self, min_ngram: int = 2, max_ngram: int = 5) -> None:
        if not 1 <= min_ngram <= max_ngram <= MAX_MATCH_LENGTH:
            raise ValueError(
                f"n-gram lengths must be 1 <= min_ngram <= max_ngram <= {MAX_MATCH_LENGTH}, "
                f"got min_ngram {min_ngram} and max_ngram {max_ngram}"
            )
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._multipliers = _hash_multipliers(max_ngram)
        self._tokens = np.empty(0, dtype=np.int32)
        self._num_tokens = 0
        # N-grams that end before `_num_sorted` are in `_sorted`, later ones in `_pending`, from
        # hash to position. The last token ends none: nothing follows it yet.
        self._sorted = np.empty(0, dtype=np.int64)
        self._num_sorted = 0
        self._pending: dict[int, int] = {}

    @property
    def num_tokens(self) -> int:
        """Length of the text so far."""
        return self._num_tokens

    def extend(self, tokens: npt.NDArray[np.int32]) -> None:
        """Append to the text.

        Args:
            tokens: `[n]`, n may be 0; copied.

        Raises:
            ValueError: `tokens` is not a row of int32, or the text exceeds `MAX_TEXT_LENGTH`.
        """
        if tokens.dtype != np.int32 or tokens.ndim != 1:
            raise ValueError(
                f"tokens must be int32 of one dimension, got {tokens.dtype} of shape {tokens.shape}"
            )
        old, new = self._num_tokens, self._num_tokens + len(tokens)
        if new > MAX_TEXT_LENGTH:
            raise ValueError(
                f"a text of {new} tokens is too long to look up in, at most {MAX_TEXT_LENGTH}; "
                f"switch look-up off for this request"
            )
        if new > len(self._tokens):
            grown = np.empty(new + new // 4, dtype=np.int32)
            grown[:old] = self._tokens[:old]
            self._tokens = grown
        self._tokens[old:new] = tokens
        self._num_tokens = new

        if new - 1 - self._num_sorted > max(_MIN_PENDING, self._num_sorted // _PENDING_SHARE):
            self._sort(new - 1)
        else:
            for position in range(max(old - 1, 0), new - 1):
                for ngram_hash in self._hashes(self._window(position, self._max_ngram)):
                    self._pending[ngram_hash] = position

    def propose(self, max_tokens: int) -> LookupBranch | None:
        """What followed the last tokens of the text at their most recent earlier occurrence.

        Where the text ends before `max_tokens` tokens, the continuation goes on with what it
        proposed itself, as if the text repeated from there: in a loop it does.

        Args:
            max_tokens: tokens to propose, at least 1.

        Returns:
            A branch of `max_tokens` tokens, or None if the last `min_ngram` tokens are new.

        Raises:
            ValueError: `max_tokens` is less than 1.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        last = self._num_tokens - 1
        window = self._window(last, MAX_MATCH_LENGTH)
        hashes = self._hashes(window)
        for length in range(len(hashes) + self._min_ngram - 1, self._min_ngram - 1, -1):
            source = self._find(hashes[length - self._min_ngram])
            if source is None:
                continue
            match_length = _agreeing(window, self._window(source, MAX_MATCH_LENGTH))
            if match_length >= length:  # else two n-grams share a hash
                return LookupBranch(self._continuation(source, max_tokens), match_length)
        return None

    def _window(self, position: int, length: int) -> list[int]:
        """The up to `length` tokens that end at `position`, the last one first."""
        window: list[int] = self._tokens[max(position + 1 - length, 0) : position + 1].tolist()
        window.reverse()
        return window

    def _continuation(self, source: int, max_tokens: int) -> npt.NDArray[np.int32]:
        start, available = source + 1, self._num_tokens - 1 - source
        if available >= max_tokens:
            tokens = self._tokens[start : start + max_tokens].copy()
        else:
            tokens = self._tokens[start + np.arange(max_tokens) % available]
        return tokens

    def _find(self, ngram_hash: int) -> int | None:
        """Where the n-gram of this hash ended most recently with a token after it."""
        position = self._pending.get(ngram_hash)
        if position is not None:
            return position
        place = int(self._sorted.searchsorted(ngram_hash | _POSITION_MASK, side="right"))
        if place == 0:
            return None
        position = int(self._sorted[place - 1]) - ngram_hash
        return position if position >= 0 else None

    def _hashes(self, window: list[int]) -> list[int]:
        """Hashes of the n-grams that end a window, from `min_ngram` tokens on."""
        total, hashes = 0, []
        for length, (token, multiplier) in enumerate(
            zip(window, self._multipliers, strict=False), start=1
        ):
            total += (token + 1) * multiplier
            if length >= self._min_ngram:
                hashes.append(total >> 1 & _HASH_MASK)
        return hashes

    def _sort(self, stop: int) -> None:
        """Move the n-grams that end before `stop` to the sorted ones: `_hashes`, vectorised."""
        start = self._num_sorted
        first = max(start - self._max_ngram + 1, 0)
        tokens = self._tokens[first:stop].astype(np.uint64) + 1
        totals = np.zeros(len(tokens), dtype=np.uint64)
        positions = np.arange(first, stop, dtype=np.int64)
        entries = []
        for back, multiplier in enumerate(self._multipliers[: len(tokens)]):
            totals[back:] += tokens[: len(tokens) - back] * np.uint64(multiplier)
            if back + 1 >= self._min_ngram:
                new = slice(max(start - first, back), None)
                entries.append(((totals[new] >> 1).view(np.int64) & _HASH_MASK) | positions[new])
        # The stable sort is a merge sort that sees sorted runs: merging costs one pass.
        added = np.sort(np.concatenate(entries))
        self._sorted = np.sort(np.concatenate([self._sorted, added]), kind="stable")
        self._num_sorted = stop
        self._pending.clear()


def _agreeing(window: list[int], other: list[int]) -> int:
    """How many tokens of two windows agree, from the last one backwards."""
    count = 0
    for token, counterpart in zip(window, other, strict=False):
        if token != counterpart:
            break
        count += 1
    return count


def _hash_multipliers(count: int) -> list[int]:
    """Odd 64-bit numbers without pattern, always the same: one per place of an n-gram."""
    words = np.random.default_rng(0).integers(1 << 64, size=count, dtype=np.uint64)
    return [int(word) | 1 for word in words]
