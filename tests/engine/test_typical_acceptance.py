"""Typical acceptance in an engine, by request and by default: its paths are those of the rule."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from medusa_plugin.tree.token_tree import TokenTree
from medusa_plugin.typical import TypicalRule
from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.drafters import LikelyDrafter

TYPICAL = {"acceptance": "typical"}


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine()


@pytest.fixture(scope="module")
def medusa(make_engine: Any, random_heads: Path) -> Any:
    return make_engine(
        speculative_config=harness.speculation(random_heads),
        additional_config={"medusa": {"sizes": "fixed"}},
    )


SMALL = TokenTree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


@pytest.fixture
def likely(medusa: Any, tiny_model: Path) -> LikelyDrafter:
    drafter = LikelyDrafter(tiny_model, SMALL, TypicalRule(0.09, 0.3))
    harness.runner_of(medusa).drafter.drafter = drafter
    return drafter


def params(options: Any = None, **others: Any) -> SamplingParams:
    extra_args = None if options is None else {"medusa": options}
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 32, "ignore_eos": True, **others}, extra_args=extra_args
    )


# Typical acceptance


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_typical_paths_are_those_of_the_rule(
    medusa: Any, likely: LikelyDrafter, temperature: float
) -> None:
    """Every path of an engine's run, recomputed from a copy of the target by the written rule."""
    requests = harness.prompts(4, lengths=[2, 9, 33, 70], vocab_size=VOCAB_SIZE, seed=1)
    accepted = harness.runner_of(medusa).accepted_tokens
    before = accepted.typical, accepted.lossless
    asked = params(TYPICAL, temperature=temperature, seed=1)
    assert [len(text) for text in harness.texts(medusa, requests, asked)] == [32] * 4
    assert likely.temperatures == {temperature}
    assert likely.judged > 20 * likely.close
    assert likely.judged > 20
    assert len(set(likely.accepted)) > 2
    assert (accepted.typical, accepted.lossless) == (before[0] + sum(likely.accepted), before[1])


def test_typical_accepts_more_than_lossless(medusa: Any, likely: LikelyDrafter) -> None:
    requests = harness.prompts(6, lengths=[2, 9, 33], vocab_size=VOCAB_SIZE, seed=2)
    rates = {}
    for acceptance in ("lossless", "typical"):
        likely.accepted.clear()
        harness.texts(medusa, requests, params({"acceptance": acceptance}, temperature=1.0, seed=3))
        rates[acceptance] = sum(likely.accepted) / len(likely.accepted)
    assert rates["typical"] > 1.2 * rates["lossless"] > 0


def test_typical_at_temperature_zero_is_greedy(
    plain: Any, medusa: Any, likely: LikelyDrafter
) -> None:
    requests = harness.prompts(6, lengths=[2, 9, 33], vocab_size=VOCAB_SIZE, seed=3)
    counted = harness.runner_of(medusa).accepted_tokens.typical
    # Nothing is lossy here, so nothing is refused either.
    for others in ({}, {"logprobs": 1, "repetition_penalty": 1.3}):
        expected = harness.texts(plain, requests, params(**others))
        assert harness.texts(medusa, requests, params(TYPICAL, **others)) == expected
    assert sum(likely.accepted) > 0
    assert likely.judged == 0
    assert harness.runner_of(medusa).accepted_tokens.typical == counted


LOSSLESS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_k": 7, "top_p": 0.9},
    {"temperature": 1.0, "seed": 7, "min_p": 0.05, "logprobs": 2},
    {"temperature": 0.7, "seed": 8, "repetition_penalty": 1.4, "min_tokens": 9},
    {"logprobs": 1},
    {"temperature": 1.2, "seed": 9, "logit_bias": {5: 3.0}},
    {"structured_outputs": StructuredOutputsParams(regex="[a-c]{30}")},
]


def test_lossless_requests_beside_typical_ones_equal_plain(
    plain: Any, medusa: Any, likely: LikelyDrafter
) -> None:
    count = len(LOSSLESS)
    requests = harness.prompts(2 * count, lengths=[2, 9, 33, 70], vocab_size=VOCAB_SIZE, seed=4)
    typical = params(TYPICAL, temperature=1.5)
    asked = [p for others in LOSSLESS for p in (params(**others), typical)]
    batch = [{"prompt_token_ids": request} for request in requests]
    found = medusa.generate(batch, asked, use_tqdm=False)[::2]
    expected = plain.generate(batch[::2], asked[::2], use_tqdm=False)
    for ours, theirs in zip(found, expected, strict=True):
        mine, known = ours.outputs[0], theirs.outputs[0]
        assert mine.token_ids == known.token_ids
        for a, b in zip(mine.logprobs or (), known.logprobs or (), strict=True):
            assert list(a) == list(b)
            assert all(a[t].logprob == pytest.approx(b[t].logprob, abs=1e-4) for t in b)
    assert likely.judged > 50
    assert max(likely.accepted) == 3


def test_seeded_typical_text_is_reproducible(medusa: Any, likely: LikelyDrafter) -> None:
    requests = harness.prompts(5, lengths=[2, 9, 33], vocab_size=VOCAB_SIZE, seed=5)
    asked = params(TYPICAL, temperature=1.3, seed=11)
    first = harness.texts(medusa, requests, asked)
    assert harness.texts(medusa, requests, asked) == first
    assert [harness.texts(medusa, [request], asked)[0] for request in requests] == first
    other = params(TYPICAL, temperature=1.3, seed=12)
    assert harness.texts(medusa, requests, other) != first


def test_placeholders_of_a_cached_prompt_are_not_judged(medusa: Any, likely: LikelyDrafter) -> None:
    """The scheduler pads a request whose whole prompt is cached by -1, which is no token."""
    request = harness.prompts(1, lengths=[65], vocab_size=VOCAB_SIZE, seed=6)
    asked = params(TYPICAL, temperature=1.0, seed=2)
    first = harness.texts(medusa, request, asked)
    assert harness.texts(medusa, request, asked) == first
    assert likely.placeholders > 0


def test_settings_of_ended_requests_are_dropped(medusa: Any, likely: LikelyDrafter) -> None:
    runner = harness.runner_of(medusa)
    for _ in range(2):
        harness.texts(medusa, [[1, 2, 3]], params(TYPICAL, temperature=1.0))
        assert len(runner._running._settings) == 1
        assert set(runner._running._settings) <= set(runner.requests)


def test_a_session_that_streams_its_input_may_change_its_parameters(
    medusa: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM schedules each piece as a new request under the same id, without finishing it."""
    runner = harness.runner_of(medusa)
    before = runner._running.settings("session", params(TYPICAL, temperature=0.5))
    assert before.typical_temperature == 0.5
    monkeypatch.setattr(GPUModelRunner, "_update_states", lambda self, output: None)
    piece = SimpleNamespace(req_id="session")
    runner._update_states(
        SimpleNamespace(finished_req_ids=(), preempted_req_ids=(), scheduled_new_reqs=[piece])
    )
    after = runner._running.settings("session", params(temperature=0.5))
    assert after.typical_temperature is None
    runner._running.forget(["session"])


# Typical acceptance as the engine's default


@pytest.fixture(scope="module")
def typical_engine(make_engine: Any, random_heads: Path) -> Any:
    return make_engine(
        speculative_config=harness.speculation(random_heads),
        additional_config={
            "medusa": {"acceptance": "typical", "typical_epsilon": 0.02, "typical_alpha": 0.1}
        },
    )


def test_the_default_and_its_parameters_reach_the_rule(
    typical_engine: Any, tiny_model: Path
) -> None:
    drafter = LikelyDrafter(tiny_model, SMALL, TypicalRule(0.02, 0.1))
    runner = harness.runner_of(typical_engine)
    runner.drafter.drafter = drafter
    requests = harness.prompts(4, lengths=[2, 9, 33], vocab_size=VOCAB_SIZE, seed=7)
    harness.texts(typical_engine, requests, params(temperature=1.0, seed=1))
    assert drafter.judged > 20
    assert runner.accepted_tokens.typical == sum(drafter.accepted)


def test_requests_that_exclude_the_default_are_lossless_and_that_is_said_once(
    plain: Any, typical_engine: Any, tiny_model: Path, warnings: list[str]
) -> None:
    drafter = LikelyDrafter(tiny_model, SMALL, TypicalRule(0.02, 0.1))
    harness.runner_of(typical_engine).drafter.drafter = drafter
    requests = harness.prompts(3, lengths=[2, 9, 33], vocab_size=VOCAB_SIZE, seed=8)
    kinds: list[dict[str, Any]] = [
        {"top_k": 20},
        {"repetition_penalty": 1.2, "top_k": 20},
        {"logprobs": 1},
    ]
    for others in kinds:
        asked = params(temperature=1.0, seed=4, **others)
        assert harness.texts(typical_engine, requests, asked) == harness.texts(
            plain, requests, asked
        )
    for name in ("top_k", "repetition_penalty", "logprobs"):
        assert any(name in message for message in warnings)
    assert len(warnings) == 3, "once per parameter, not per request"
    explicit = params({"acceptance": "lossless"}, temperature=1.0, seed=4)
    expected = harness.texts(plain, requests, params(temperature=1.0, seed=4))
    assert harness.texts(typical_engine, requests, explicit) == expected
    assert len(warnings) == 3
    assert drafter.judged == 0
    assert sum(drafter.accepted) > 0
