"""What differs between two answers to a request, and whether rounding can explain it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.soak.cases import MAX_MODEL_LEN, Case
from tests.soak.engines import Completion, Outcome

TOLERANCE = 1e-4
"""Of log-probabilities and of logits, before anything amplifies them: about three times what
float32 sums differ by in another order on the tiny model."""


@dataclass(frozen=True)
class Scored:
    """A log-probability or logit that is not as plain vLLM has it."""

    is_prompt: bool
    """Of the prompt, or of the answer."""
    position: int
    """In it."""
    difference: float


@dataclass(frozen=True)
class Difference:
    """One thing that is not as plain vLLM has it."""

    what: str
    completion: int = 0
    position: int | None = None
    """First token that differs; only then may it be a tie."""
    tokens: tuple[int, int] | None = None
    """Ours and that of plain vLLM, at `position`."""
    ranked: int | None = None
    """Token whose rank at `position` is one off, as where another is level with it."""
    scored: Scored | None = None
    is_rounding: bool = False
    """Known to be within `TOLERANCE`."""


def differences(ours: Outcome, plain: Outcome, tolerance: float = TOLERANCE) -> list[Difference]:
    """All differences of a determined request; an aborted one may end early.

    Args:
        ours: of the engine under test.
        plain: of plain vLLM.
        tolerance: of log-probabilities.
    """
    found = list(_prompt(ours, plain))
    if not ours.aborted and sorted(ours.completions) != sorted(plain.completions):
        found.append(
            Difference(f"completions {sorted(ours.completions)}, not {sorted(plain.completions)}")
        )
    for index, mine in sorted(ours.completions.items()):
        theirs = plain.completions.get(index)
        if theirs is not None:
            found += _completion(index, mine, theirs, tolerance, may_be_cut=ours.aborted)
    return found


def _prompt(ours: Outcome, plain: Outcome) -> Iterator[Difference]:
    if ours.aborted and ours.prompt_logprobs is None:
        return
    mine, theirs = ours.prompt_logprobs, plain.prompt_logprobs
    if mine is None or theirs is None:
        if mine is not theirs:
            yield Difference(f"prompt logprobs {mine}, not {theirs}")
        return
    yield from _logprobs("prompt logprobs", 0, mine, theirs, TOLERANCE)


def _completion(
    index: int, mine: Completion, theirs: Completion, tolerance: float, may_be_cut: bool
) -> Iterator[Difference]:
    cut = may_be_cut and mine.finish_reason in (None, "abort")
    for position, pair in enumerate(zip(mine.token_ids, theirs.token_ids, strict=False)):
        if pair[0] != pair[1]:
            yield Difference(f"token {pair[0]}, not {pair[1]}", index, position, pair)
            return
    counts = len(mine.token_ids), len(theirs.token_ids)
    if counts[0] > counts[1] or (counts[0] < counts[1] and not cut):
        yield Difference(f"{counts[0]} tokens, not {counts[1]}", index)
        return
    if not cut:
        for name in ("text", "finish_reason", "stop_reason"):
            values = getattr(mine, name), getattr(theirs, name)
            if values[0] != values[1]:
                yield Difference(f"{name} {values[0]!r}, not {values[1]!r}", index)
    elif not theirs.text.startswith(mine.text.rstrip("\ufffd")):
        yield Difference(f"text {mine.text!r} is no start of {theirs.text!r}", index)
    if mine.logprobs is None or theirs.logprobs is None:
        if mine.logprobs is not theirs.logprobs and not cut:
            yield Difference("logprobs on one side only", index)
    elif len(mine.logprobs) != counts[0]:
        yield Difference(f"{len(mine.logprobs)} logprobs for {counts[0]} tokens", index)
    else:
        known = theirs.logprobs[: counts[0]]
        yield from _logprobs("logprobs", index, mine.logprobs, known, tolerance)


def _logprobs(
    name: str, index: int, mine: Sequence[Any], theirs: Sequence[Any], tolerance: float
) -> Iterator[Difference]:
    if len(mine) != len(theirs):
        yield Difference(f"{len(mine)} {name}, not {len(theirs)}", index)
        return
    for position, (ours, plain) in enumerate(zip(mine, theirs, strict=True)):
        ours, plain = _possible(ours), _possible(plain)
        if ours is None or plain is None:
            if ours is not plain:
                yield Difference(f"{name} at {position}: {ours}, not {plain}", index)
            continue
        yield from _one_position(name, index, position, ours, plain, tolerance)


def _possible(entry: dict[int, Any] | None) -> dict[int, Any] | None:
    """Without tokens that a grammar forbids: which of them are listed depends on the batch."""
    if entry is None:
        return None
    return {token: found for token, found in entry.items() if found.logprob != -math.inf}


def _one_position(
    kind: str,
    index: int,
    position: int,
    ours: dict[int, Any],
    plain: dict[int, Any],
    tolerance: float,
) -> Iterator[Difference]:
    name, is_prompt = f"{kind} at {position}", kind.startswith("prompt")
    for token in ours.keys() & plain.keys():
        mine, theirs = ours[token], plain[token]
        if not _close(mine.logprob, theirs.logprob, tolerance):
            yield Difference(
                f"{name}: token {token} {mine.logprob}, not {theirs.logprob}",
                index,
                scored=Scored(is_prompt, position, abs(mine.logprob - theirs.logprob)),
            )
        elif mine.decoded_token != theirs.decoded_token:
            yield Difference(
                f"{name}: decoded {mine.decoded_token!r}, not {theirs.decoded_token!r}", index
            )
        elif mine.rank != theirs.rank:
            # Neighbours that are level swap their ranks; nothing else moves one by one.
            level = abs(mine.rank - theirs.rank) == 1
            yield Difference(
                f"{name}: token {token} has rank {mine.rank}, not {theirs.rank}",
                index,
                None if is_prompt else position,
                ranked=token if level else None,
                is_rounding=level and is_prompt,
            )
    if list(ours) == list(plain):
        return
    only = [entry[t] for entry, t in _unshared(ours, plain)]
    level = len(ours) == len(plain) and _level(only or [*ours.values()], tolerance)
    yield Difference(f"{name}: tokens {list(ours)}, not {list(plain)}", index, is_rounding=level)


def _unshared(ours: dict[int, Any], plain: dict[int, Any]) -> list[tuple[dict[int, Any], int]]:
    return [(ours, t) for t in ours.keys() - plain.keys()] + [
        (plain, t) for t in plain.keys() - ours.keys()
    ]


def _level(entries: Sequence[Any], tolerance: float) -> bool:
    values = sorted(entry.logprob for entry in entries)
    return any(b - a < tolerance for a, b in itertools.pairwise(values))


def _close(first: float, second: float, tolerance: float) -> bool:
    return first == second or abs(first - second) <= tolerance


def broken_rules(case: Case, outcome: Outcome) -> list[Difference]:
    """What an unseeded request must keep to, whatever was drawn."""
    if outcome.aborted:
        return []
    found = []
    if sorted(outcome.completions) != list(range(case.num_completions)):
        found.append(Difference(f"completions {sorted(outcome.completions)}"))
    for index, completion in outcome.completions.items():
        found += [Difference(rule, index) for rule in _broken(case, completion)]
    return found


def _broken(case: Case, completion: Completion) -> Iterator[str]:
    params = case.sampling_params()
    tokens = completion.token_ids
    room = MAX_MODEL_LEN - len(case.prompt)
    most = min(params.max_tokens or MAX_MODEL_LEN, room)
    if not 0 < len(tokens) <= most:
        yield f"{len(tokens)} tokens of at most {most}"
    if completion.finish_reason == "length" and len(tokens) != most:
        yield f"finished by length after {len(tokens)} tokens of {most}"
    if completion.finish_reason not in ("length", "stop", "repetition"):
        yield f"finish reason {completion.finish_reason}"
    stops = set(params.stop_token_ids) & set(tokens[max(params.min_tokens - 1, 0) : -1])
    if stops:
        yield f"went on after stop tokens {stops}"
    if completion.finish_reason == "stop" and len(tokens) < params.min_tokens:
        yield f"stopped after {len(tokens)} tokens of at least {params.min_tokens}"
    if params.allowed_token_ids and not set(tokens) <= set(params.allowed_token_ids):
        yield f"tokens {set(tokens) - set(params.allowed_token_ids)} are not allowed"
    never = {token for token, bias in (params.logit_bias or {}).items() if bias <= -100}
    if never & set(tokens) and not params.allowed_token_ids:
        yield f"tokens {never & set(tokens)} have a bias of -100"
    entries = completion.logprobs
    if params.logprobs is not None and len(entries or ()) != len(tokens):
        yield f"{len(entries or ())} logprobs for {len(tokens)} tokens"
    for token, entry in zip(tokens, entries or (), strict=False):
        if token not in entry or not math.isfinite(entry[token].logprob):
            yield f"no logprob of token {token}"
