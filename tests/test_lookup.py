"""Prompt look-up: every proposal equals that of a plain search, at a cost that does not grow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_plugin import lookup
from medusa_plugin.lookup import MAX_MATCH_LENGTH, PRIOR_HIT_RATE, LookupIndex

LARGEST_TOKEN = 2**31 - 1


def row(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def reference(
    text: list[int], max_tokens: int, min_ngram: int = 2, max_ngram: int = 5
) -> tuple[list[int], int] | None:
    """The branch's tokens and match length, by trying every place of the text."""
    for length in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                longer = list(text)
                for j in range(max_tokens):
                    longer.append(longer[end + j])
                match_length = length
                while (
                    match_length < min(end, MAX_MATCH_LENGTH)
                    and text[end - match_length - 1] == text[len(text) - match_length - 1]
                ):
                    match_length += 1
                return longer[len(text) :], match_length
    return None


def proposed(index: LookupIndex, max_tokens: int) -> tuple[list[int], int] | None:
    branch = index.propose(max_tokens)
    if branch is None:
        return None
    assert branch.tokens.dtype == np.int32
    return branch.tokens.tolist(), branch.match_length


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    alphabet = draw(
        st.sampled_from([[0], [0, 1], [0, 1, 2, 3], [7, LARGEST_TOKEN, LARGEST_TOKEN - 1]])
    )
    return draw(st.lists(st.sampled_from(alphabet), max_size=60))


@pytest.fixture(params=[16, 256], ids=lambda pending: f"merge after {pending}")
def _pending(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts reach the sorted n-grams too."""
    monkeypatch.setattr(lookup, "_MIN_PENDING", request.param)


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(2, 5), (1, 1), (3, 3), (1, 16)])
@pytest.mark.usefixtures("_pending")
def test_every_step_proposes_what_a_plain_search_finds(min_ngram: int, max_ngram: int) -> None:
    @settings(max_examples=200, deadline=None)
    @given(texts(), st.lists(st.integers(0, 9), max_size=60), st.integers(1, 9))
    def check(text: list[int], pieces: list[int], max_tokens: int) -> None:
        index = LookupIndex(min_ngram, max_ngram)
        start = 0
        for piece in [*pieces, len(text)]:
            index.extend(row(text[start : start + piece]))
            start = min(start + piece, len(text))
            assert index.num_tokens == start
            expected = reference(text[:start], max_tokens, min_ngram, max_ngram)
            assert proposed(index, max_tokens) == expected

    check()


@pytest.mark.parametrize("alphabet", [2, 5, 20, 100])
@pytest.mark.usefixtures("_pending")
def test_ngrams_across_merges_are_found(alphabet: int) -> None:
    random = np.random.default_rng(alphabet)
    text = (random.integers(0, alphabet, 150) * (LARGEST_TOKEN // alphabet)).tolist()
    for _ in range(6):  # quotes of any earlier place
        start = int(random.integers(0, len(text) - 40))
        text += text[start : start + 40]
    index = LookupIndex()
    start = 0
    while start < len(text):
        end = start + int(random.integers(1, 6))
        index.extend(row(text[start:end]))
        assert proposed(index, 3) == reference(text[:end], 3)
        start = end


@pytest.mark.parametrize("period", [1, 2, 3, 7, 20])
def test_periodic_text_is_continued_past_its_end(period: int) -> None:
    text = [i % period for i in range(3 * period + 6)]
    index = LookupIndex()
    index.extend(row(text))
    continued = [i % period for i in range(len(text), len(text) + 50)]
    longest = min(len(text) - period, MAX_MATCH_LENGTH)
    assert proposed(index, 50) == (continued, longest)


def test_text_without_repeats_proposes_nothing() -> None:
    index = LookupIndex()
    text = np.random.default_rng(0).permutation(2000).astype(np.int32)
    for start in range(0, len(text), 3):
        index.extend(text[start : start + 3])
        assert index.propose(4) is None


def test_a_longer_match_wins_over_a_more_recent_one_and_ties_go_to_the_more_recent() -> None:
    older, newer = [1, 2, 3, 4, 100], [9, 3, 4, 200]
    index = LookupIndex()
    index.extend(row([*older, *newer, 1, 2, 3, 4]))
    assert proposed(index, 1) == ([100], 4)
    index = LookupIndex(max_ngram=2)
    index.extend(row([*older, *newer, 1, 2, 3, 4]))
    assert proposed(index, 1) == ([200], 2)


def test_a_match_is_measured_beyond_the_longest_ngram_and_up_to_the_start_of_the_text() -> None:
    for shared, expected in [(5, 5), (11, 11), (16, 16), (30, MAX_MATCH_LENGTH)]:
        passage = list(range(10, 10 + shared))
        index = LookupIndex()
        index.extend(row([*passage, 1, 2, *passage]))
        assert proposed(index, 2) == ([1, 2], expected)


@pytest.mark.parametrize("text", [[], [3], [3, 3]])
def test_text_too_short_to_hold_an_ngram_twice_proposes_nothing(text: list[int]) -> None:
    index = LookupIndex()
    index.extend(row(text))
    index.extend(row([]))
    assert index.num_tokens == len(text)
    assert index.propose(3) is None


def test_a_branch_survives_what_comes_after_it() -> None:
    index = LookupIndex()
    tokens = row([1, 2, 3, 4, 1, 2])
    index.extend(tokens)
    tokens[:] = 0  # the caller's buffer is its own
    branch = index.propose(2)
    assert branch is not None
    branch.tokens[:] = 9
    assert proposed(index, 2) == ([3, 4], 2)


def test_ngrams_that_share_a_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every hash the same: only the most recent n-gram is found, and only if it is the right one.
    monkeypatch.setattr(lookup, "_HASH_MASK", 0)
    index = LookupIndex()
    index.extend(row([1, 2, 3, 4, 5, 6, 1, 2]))
    assert index.propose(1) is None
    index.extend(row([2, 2]))
    assert proposed(index, 2) == ([2, 2], 2)


def test_the_work_per_token_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = ordered = merged = probes = 0
    hashes, sort, find = LookupIndex._hashes, np.sort, LookupIndex._find

    def counting_hashes(self: LookupIndex, window: list[int]) -> list[int]:
        nonlocal hashed
        hashed += 1
        return hashes(self, window)

    def counting_sort(entries: np.ndarray, kind: str | None = None) -> np.ndarray:
        nonlocal ordered, merged
        if kind == "stable":
            merged += len(entries)
        else:
            ordered += len(entries)
        return sort(entries, kind=kind)

    def counting_find(self: LookupIndex, ngram_hash: int) -> int | None:
        nonlocal probes
        probes += 1
        return find(self, ngram_hash)

    monkeypatch.setattr(LookupIndex, "_hashes", counting_hashes)
    monkeypatch.setattr(LookupIndex, "_find", counting_find)
    monkeypatch.setattr(np, "sort", counting_sort)
    # Two tokens only: each n-gram has occurred as often as it can have.
    text = np.random.default_rng(0).integers(0, 2, 64_000).astype(np.int32)
    index = LookupIndex()
    for start in range(0, len(text), 4):
        index.extend(text[start : start + 4])
        probes = 0
        index.propose(4)
        assert probes <= 4  # one per n-gram length
        if start + 4 in (4_000, 16_000, 64_000):
            assert hashed <= index.num_tokens * (1 + 1 / 4)  # once, and the last of each look-up
            assert ordered <= index.num_tokens * 4  # each n-gram once, of four lengths
            assert merged <= index.num_tokens * 4 * (lookup._PENDING_SHARE + 3)
    assert len(set(index._sorted.tolist())) == len(index._sorted)  # no n-gram is held twice


@pytest.mark.parametrize(("shortest", "longest"), [(0, 5), (3, 2), (2, 17)])
def test_bad_ngram_lengths_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ValueError, match=f"min_ngram {shortest} and max_ngram {longest}"):
        LookupIndex(shortest, longest)


def test_what_is_no_row_of_int32_is_refused() -> None:
    with pytest.raises(ValueError, match="int32 of one dimension, got int64"):
        LookupIndex().extend(np.zeros(3, dtype=np.int64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got int32 of shape \(1, 3\)"):
        LookupIndex().extend(np.zeros((1, 3), dtype=np.int32))


def test_text_beyond_the_limit_is_refused_and_leaves_the_index_as_it_was() -> None:
    index = LookupIndex()
    index.extend(row([1, 2, 3, 1, 2]))
    too_many = np.broadcast_to(np.int32(5), lookup.MAX_TEXT_LENGTH - 4)
    with pytest.raises(ValueError, match=f"{lookup.MAX_TEXT_LENGTH + 1} tokens is too long"):
        index.extend(too_many)
    assert proposed(index, 2) == ([3, 1], 2)


def test_a_proposal_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        LookupIndex().propose(0)


def test_the_prior_has_an_entry_per_match_length_and_rises_with_it() -> None:
    assert len(PRIOR_HIT_RATE) == MAX_MATCH_LENGTH + 1
    assert all(0 <= rate < 1 for rate in PRIOR_HIT_RATE)
    assert list(PRIOR_HIT_RATE) == sorted(PRIOR_HIT_RATE)
