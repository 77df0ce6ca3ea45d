"""How far plain vLLM is from choosing another token: rounding, or a fault?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.soak.cases import Case
from tests.soak.engines import Engine

LARGEST_GAP = 16.0


def logit_gap(
    plain: Engine, case: Case, completion: int, known: Sequence[int], wanted: int
) -> float:
    """The least change of logits that makes plain vLLM take another token at one position.

    The two logits in question move towards each other, before everything else that a sampler
    does, so this holds for greedy and for seeded requests, whatever their parameters.

    Args:
        plain: engine without speculation.
        case: the request.
        completion: index of the answer.
        known: tokens of the answer, up to and with the one in question.
        wanted: token to be taken instead of the last of `known`.

    Returns:
        The gap between both logits; 0 where plain vLLM itself takes `wanted` when it answers this
        request alone; infinite where no change up to `LARGEST_GAP` does it.
    """
    params = _alone(case, completion, known)

    def takes(change: float) -> bool:
        with _Push(plain, known, wanted, change) as push:
            plain.serve([case], [params])
        return push.taken == wanted

    if takes(0.0):
        return 0.0
    low, high = 0.0, 1e-6
    while not takes(high):
        low, high = high, high * 8
        if high > LARGEST_GAP:
            return float("inf")
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (low, middle) if takes(middle) else (middle, high)
    return high


def nearest_gap(
    plain: Engine, case: Case, completion: int, known: Sequence[int], token: int
) -> float:
    """How near another logit comes to that of `token`, where the last of `known` is drawn."""
    params = _alone(case, completion, known)
    with _Push(plain, known, token, 0.0) as push:
        plain.serve([case], [params])
    assert push.logits is not None
    distances = (push.logits - push.logits[token]).abs()
    distances[token] = float("inf")
    return float(distances.min())


def _alone(case: Case, completion: int, known: Sequence[int]) -> Any:
    """Parameters of one answer, no longer than needed."""
    seed = case.params.get("seed")
    return case.sampling_params(
        n=1,
        seed=None if seed is None else seed + completion,
        max_tokens=max(len(known), case.params.get("min_tokens", 0)),
        stop=None,
        repetition_detection=None,
    )


class _Push:
    """While inside, the engine's only request repeats `known`; the last of them meets a change."""

    def __init__(self, engine: Engine, known: Sequence[int], wanted: int, change: float) -> None:
        self._sampler = engine.runner.sampler
        self._known, self._wanted, self._change = known, wanted, change
        self._calls = 0
        self.taken: int | None = None
        self.logits: torch.Tensor | None = None

    def __enter__(self) -> _Push:
        self._forward = self._sampler.forward
        self._sampler.forward = self._sample
        return self

    def __exit__(self, *_: object) -> None:
        del self._sampler.forward

    def _sample(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        position, self._calls = self._calls, self._calls + 1
        is_last = position == len(self._known) - 1
        if is_last:
            self.logits = logits[0].clone()
            logits[0, self._wanted] += self._change / 2
            logits[0, self._known[-1]] -= self._change / 2
        output = self._forward(logits, *args, **kwargs)
        if is_last:
            self.taken = int(output.sampled_token_ids[0, 0])
        elif position < len(self._known):
            output.sampled_token_ids[0, 0] = self._known[position]
        return output
