"""Random requests: every parameter whose outcome plain vLLM determines, mixed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    StructuredOutputsParams,
)

from tests.engine.conftest import EOS_TOKEN_ID, VOCAB_SIZE

MAX_MODEL_LEN = 192
NUM_BYTES = 256
"""Tokens below it are the bytes of the text; the others are names like <extra_260>."""

_OTHER_MODES = ["processed_logprobs", "raw_logits", "processed_logits"]
# A handful: each is compiled once per engine.
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"regex": r"[a-f]{3}-[0-9]{4}"},
    {"regex": r"(ab|ba)*c?"},
    {"regex": r"[a-z ]{1,40}"},
    {"choice": ["alpha", "alphabet", "beta", "b"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json": {"type": "array", "items": {"enum": ["x", "yy", 3]}, "minItems": 1}},
    {"grammar": 'root ::= "(" root ")" | [0-9]+'},
)


@dataclass(frozen=True)
class Case:
    """One request: what it asks, and what happens to it in the engine under test."""

    name: str
    prompt: tuple[int, ...]
    params: dict[str, Any]
    """Arguments of `SamplingParams`; `structured_outputs` and `repetition_detection` as those of
    their own classes."""
    arrival: int
    """Step in which it comes."""
    abort_after: int | None = None
    """Steps after its arrival."""
    priority: int = 0
    medusa: dict[str, Any] | None = field(default=None)
    """What it asks of Medusa: its text stays the same."""

    @property
    def is_determined(self) -> bool:
        """Whether plain vLLM gives one answer only."""
        return self.params["temperature"] == 0 or self.params.get("seed") is not None

    @property
    def num_completions(self) -> int:
        """Answers that it gets."""
        return int(self.params.get("n", 1))

    def amplification(self, logprobs_mode: str) -> float:
        """How many times the model's rounding its log-probabilities may carry."""
        if not logprobs_mode.startswith("processed"):
            return 1.0
        penalty = self.params.get("repetition_penalty", 1.0)
        temperature = self.params["temperature"] or 1.0  # greedy logits are not divided
        return max(1.0, penalty, 1 / penalty) / min(1.0, temperature)

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """The parameters without those for Medusa, changed."""
        params = {**self.params, **changes}
        if params.get("structured_outputs") is not None:
            params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
        if params.get("repetition_detection") is not None:
            params["repetition_detection"] = RepetitionDetectionParams(
                **params["repetition_detection"]
            )
        return SamplingParams(**params)

    def unbounded_params(self) -> SamplingParams:
        """The same text, beyond where the request stops: what a good draft would hold."""
        most = self.params["max_tokens"] or MAX_MODEL_LEN
        return self.sampling_params(
            max_tokens=min(most + 8, MAX_MODEL_LEN - len(self.prompt)),
            min_tokens=0,
            stop=None,
            stop_token_ids=None,
            repetition_detection=None,
            ignore_eos=True,
            logprobs=None,
            logprob_token_ids=None,
            prompt_logprobs=None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


@dataclass(frozen=True)
class Mood:
    """What the requests of one round have in common."""

    density: float
    """Of parameters, 0 for none: only then do whole batches decode greedily and nothing else."""
    greedy: float
    """Share of greedy requests."""
    pace: int
    """Most steps between two arrivals."""
    logprobs_mode: str = "raw_logprobs"
    """Of the engines."""
    lists_tokens: bool = False
    """Whether log-probabilities are asked of listed tokens: vLLM answers requests wrongly that ask
    for the best ones beside them in a batch."""


def random_mood(pick: random.Random) -> Mood:
    """Mostly everything mixed; now and then nothing but greedy decoding."""
    if pick.random() < 0.12:
        return Mood(density=0.0, greedy=1.0, pace=pick.choice([0, 1, 3]))
    return Mood(
        density=pick.choice([0.5, 1.0, 1.0, 1.6]),
        greedy=pick.choice([0.3, 0.5, 0.7]),
        pace=pick.choice([0, 1, 1, 3]),
        logprobs_mode=pick.choice(["raw_logprobs"] * 3 + _OTHER_MODES),
        lists_tokens=pick.random() < 0.2,
    )


def random_cases(pick: random.Random, mood: Mood, count: int) -> list[Case]:
    """Requests that know nothing of each other but shared prefixes."""
    bases = [[pick.randrange(VOCAB_SIZE) for _ in range(MAX_MODEL_LEN)] for _ in range(3)]
    cases, step = [], 0
    for i in range(count):
        params = _random_params(pick, mood)
        prompt = _random_prompt(pick, bases)
        step += pick.randint(0, mood.pace) if pick.random() < 0.5 else 0
        cases.append(_case(pick, f"r{i}", prompt, params, step))
    return cases


def _case(
    pick: random.Random, name: str, prompt: Sequence[int], params: dict[str, Any], arrival: int
) -> Case:
    if "min_tokens" in params:
        params = {**params, "min_tokens": min(params["min_tokens"], MAX_MODEL_LEN - len(prompt))}
    return Case(
        name=name,
        prompt=tuple(prompt),
        params=params,
        arrival=arrival,
        abort_after=pick.randint(0, 9) if pick.random() < 0.06 else None,
        priority=pick.randrange(4),
        medusa=pick.choice(
            [None, None, None, {"enabled": False}, {"max_nodes": pick.randint(1, 20)}]
        ),
    )


def _random_prompt(pick: random.Random, bases: Sequence[Sequence[int]]) -> list[int]:
    length = pick.choice(
        [
            pick.randint(1, 12),
            pick.randint(1, 70),
            pick.choice([31, 32, 33, 63, 64, 65, 96, 127, 128, 129]),
            pick.choice([pick.randint(100, 170), pick.randint(170, MAX_MODEL_LEN - 1)]),
        ]
    )
    if pick.random() < 0.5:
        return [pick.randrange(VOCAB_SIZE) for _ in range(length)]
    fresh = min(pick.choice([0, 0, 1, 3, 20]), length - 1)
    return [
        *pick.choice(bases)[: length - fresh],
        *(pick.randrange(VOCAB_SIZE) for _ in range(fresh)),
    ]


def _random_params(pick: random.Random, mood: Mood) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": pick.choice([1, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24]),
        "output_kind": pick.choice(list(RequestOutputKind)),
    }
    if pick.random() < 0.02:
        params["max_tokens"] = pick.choice([60, None])
    if pick.random() >= mood.greedy:
        params["temperature"] = pick.choice([0.3, 0.7, 1.0, 1.6])
        params["seed"] = pick.randrange(10**6) if pick.random() < 0.85 else None
    if mood.density == 0:
        return params | {"ignore_eos": pick.random() < 0.5}
    for probability, make in _FEATURES:
        if pick.random() < probability * mood.density:
            params |= make(pick, params)
    if mood.lists_tokens and params.pop("logprobs", None) is not None:
        params["logprob_token_ids"] = pick.sample(range(VOCAB_SIZE), pick.randint(1, 6))
    return _without_contradictions(params)


def _sampling(pick: random.Random, params: dict[str, Any]) -> dict[str, Any]:
    if not params["temperature"]:
        return {}
    kinds = [{"top_k": pick.choice([1, 2, 7, 40])}, {"top_p": pick.choice([0.1, 0.7, 0.95])}]
    kinds.append({"min_p": pick.choice([0.02, 0.2])})
    return {
        key: value for kind in pick.sample(kinds, pick.randint(1, 3)) for key, value in kind.items()
    }


def _parallel(pick: random.Random, params: dict[str, Any]) -> dict[str, Any]:
    return {"n": pick.randint(2, 4)} if params["temperature"] else {}


def _stop_strings(pick: random.Random, params: dict[str, Any]) -> dict[str, Any]:
    texts = ["a", "x", "e", " ", "q!", "<extra_260>", "\ufffd"]
    return {
        "stop": pick.sample(texts, pick.randint(1, 3)),
        "include_stop_str_in_output": pick.random() < 0.5,
    }


def _allowed(pick: random.Random, params: dict[str, Any]) -> dict[str, Any]:
    count = pick.choice([12, 40, 200])
    return {"allowed_token_ids": sorted({*pick.sample(range(VOCAB_SIZE), count), EOS_TOKEN_ID})}


def _structure(pick: random.Random, params: dict[str, Any]) -> dict[str, Any]:
    return {"structured_outputs": pick.choice(STRUCTURES)}


_Make = Callable[[random.Random, dict[str, Any]], dict[str, Any]]
_FEATURES: tuple[tuple[float, _Make], ...] = (
    (0.4, _sampling),
    (0.15, _parallel),
    (0.3, lambda pick, _: {"ignore_eos": True}),
    (0.1, lambda pick, _: {"repetition_penalty": pick.choice([0.8, 1.1, 1.5])}),
    (0.1, lambda pick, _: {"presence_penalty": pick.choice([-1.0, 0.8, 2.0])}),
    (0.1, lambda pick, _: {"frequency_penalty": pick.choice([-0.7, 0.5, 1.9])}),
    (0.12, lambda pick, _: {"logit_bias": {EOS_TOKEN_ID: pick.choice([3.0, 6.0, 12.0])}}),
    (
        0.1,
        lambda pick, _: {
            "logit_bias": {
                pick.randrange(VOCAB_SIZE): pick.choice([-100.0, 2.0, 5.0])
                for _ in range(pick.randint(1, 9))
            }
        },
    ),
    (0.08, lambda pick, _: {"bad_words": pick.sample(["a", "bc", "e", " t", "zz", "0"], 3)}),
    (0.08, _allowed),
    (0.15, lambda pick, _: {"min_tokens": pick.choice([1, 2, 5, 11])}),
    (0.12, lambda pick, _: {"stop_token_ids": pick.sample(range(VOCAB_SIZE), pick.randint(1, 30))}),
    (0.12, _stop_strings),
    (0.2, lambda pick, _: {"logprobs": pick.choice([0, 1, 3, 5])}),
    (0.08, lambda pick, _: {"prompt_logprobs": pick.choice([0, 1, 3])}),
    (0.1, lambda pick, _: {"flat_logprobs": True}),
    (0.1, lambda pick, _: {"skip_special_tokens": False}),
    (0.05, lambda pick, _: {"spaces_between_special_tokens": False}),
    (0.06, lambda pick, _: {"detokenize": False}),
    (0.08, lambda pick, _: {"stream_interval": pick.choice([1, 2, 5])}),
    (0.05, lambda pick, _: {"skip_reading_prefix_cache": True}),
    (
        0.06,
        lambda pick, _: {
            "repetition_detection": {"max_pattern_size": pick.choice([1, 3]), "min_count": 2}
        },
    ),
    (0.12, _structure),
)


def _without_contradictions(params: dict[str, Any]) -> dict[str, Any]:
    """Leave out what vLLM refuses, and what may forbid every token."""
    if params.get("structured_outputs"):
        for name in ("bad_words", "allowed_token_ids", "logit_bias", "min_tokens", "ignore_eos"):
            params.pop(name, None)
        # A grammar ends at any of them, so a byte that it needs must not be one.
        params["stop_token_ids"] = [t for t in params.get("stop_token_ids", ()) if t >= NUM_BYTES]
    if not params.get("detokenize", True):
        params.pop("stop", None)
    if params["max_tokens"] is not None and "min_tokens" in params:
        params["min_tokens"] = min(params["min_tokens"], params["max_tokens"])
    return params


def follow_ups(
    pick: random.Random, asked: Sequence[tuple[Case, Sequence[int], str]], count: int
) -> list[Case]:
    """Requests made from earlier ones and their answers.

    Args:
        pick: random choices.
        asked: requests with token ids and text of their first answer.
        count: how many to make.

    Returns:
        Longer prompts that share the answer's KV blocks, and the same prompts again with a
        parameter that bites where the answer is.
    """
    last = max(case.arrival for case, _, _ in asked)
    useful = [entry for entry in asked if entry[0].is_determined and entry[1]]
    made: list[Case] = []
    while len(made) < count and useful:
        case, tokens, text = pick.choice(useful)
        change = pick.choice(_FOLLOW_UPS)(pick, case, list(tokens), text)
        if change is None:
            continue
        prompt, params = change
        arrival = pick.randint(case.arrival, last + 5)
        name = f"f{len(made)}"
        params = _without_contradictions(dict(params))
        made.append(_case(pick, name, prompt, params, arrival))
    return sorted(made, key=lambda made_case: made_case.arrival)


_Change = tuple[Sequence[int], dict[str, Any]]


def _continued(pick: random.Random, case: Case, tokens: list[int], text: str) -> _Change | None:
    fresh = [pick.randrange(VOCAB_SIZE) for _ in range(pick.choice([0, 0, 1, 4]))]
    prompt = [*case.prompt, *tokens[: pick.randint(1, len(tokens))], *fresh]
    if len(prompt) >= MAX_MODEL_LEN:
        return None
    return prompt, case.params


def _stopped_by_token(pick: random.Random, case: Case, tokens: list[int], text: str) -> _Change:
    extra = {"stop_token_ids": [pick.choice(tokens)]}
    if pick.random() < 0.3:
        extra["min_tokens"] = pick.randint(0, len(tokens))
    return case.prompt, {**case.params, **extra}


def _stopped_by_text(
    pick: random.Random, case: Case, tokens: list[int], text: str
) -> _Change | None:
    if not text:
        return None
    start = pick.randrange(len(text))
    stop = [text[start : start + pick.randint(1, 4)]]
    if pick.random() < 0.3:
        stop.append(text[start : start + 1])
    extra = {"stop": stop, "include_stop_str_in_output": pick.random() < 0.5}
    if pick.random() < 0.3:
        extra["min_tokens"] = pick.randint(0, len(tokens))
    return case.prompt, {**case.params, **extra}


def _biased(pick: random.Random, case: Case, tokens: list[int], text: str) -> _Change:
    bias = {pick.choice(tokens): pick.choice([-100.0, -2.0, 4.0]) for _ in range(3)}
    return case.prompt, {**case.params, "logit_bias": bias}


def _bad_word(pick: random.Random, case: Case, tokens: list[int], text: str) -> _Change | None:
    start = pick.randrange(len(text)) if text else 0
    word = text[start : start + pick.randint(1, 3)]
    if not word.strip() or "\ufffd" in word or not word.isascii():
        return None
    return case.prompt, {**case.params, "bad_words": [word]}


def _shortened(pick: random.Random, case: Case, tokens: list[int], text: str) -> _Change:
    return case.prompt, {**case.params, "max_tokens": pick.randint(1, len(tokens) + 2)}


_FOLLOW_UPS: tuple[Callable[..., _Change | None], ...] = (
    _continued,
    _continued,
    _stopped_by_token,
    _stopped_by_text,
    _stopped_by_text,
    _biased,
    _bad_word,
    _shortened,
)
