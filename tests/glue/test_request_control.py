"""Requests are checked in the front end, as an error that vLLM answers with status 400."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from medusa_plugin.vllm_glue import request_control, support
from medusa_plugin.vllm_glue.request_control import InvalidRequestError, validate_request
from medusa_plugin.vllm_glue.translate import PROPOSER

OURS = SimpleNamespace(model=PROPOSER)
PLAIN_MODEL = SimpleNamespace(logits_processors=None)


def asking(acceptance: str, **others: Any) -> SamplingParams:
    return SamplingParams(extra_args={"medusa": {"acceptance": acceptance}}, **others)


EXCLUDING: dict[str, Any] = {
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 0.9,
    "top_p": 0.99,
    "top_k": 50,
    "min_p": 0.01,
    "min_tokens": 1,
    "logit_bias": {1: 0.5},
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "structured_outputs": StructuredOutputsParams(regex="a"),
    "thinking_token_budget": 3,
    "logprobs": 0,
    "logprob_token_ids": [1],
}


def test_every_excluding_parameter_is_tested() -> None:
    assert list(EXCLUDING) == list(request_control._NEUTRAL)


@pytest.mark.parametrize("name", EXCLUDING)
def test_excluding_parameters(name: str) -> None:
    others = {name: EXCLUDING[name]}
    with pytest.raises(InvalidRequestError, match=f"cannot be combined with {name}="):
        validate_request(asking("typical", **others), PLAIN_MODEL, OURS)
    validate_request(asking("lossless", **others), PLAIN_MODEL, OURS)
    # Nothing is lossy at temperature 0.
    validate_request(asking("typical", temperature=0, **others), PLAIN_MODEL, OURS)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"top_k": -1},
        {"seed": 3, "n": 2, "stop": ["x"], "stop_token_ids": [3], "ignore_eos": True},
        {"prompt_logprobs": 1, "max_tokens": 9, "logit_bias": {}, "bad_words": []},
    ],
)
def test_others_do_not_exclude(others: dict[str, Any]) -> None:
    validate_request(asking("typical", **others), PLAIN_MODEL, OURS)


def test_large_values_are_shortened() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate_request(
            asking("typical", allowed_token_ids=list(range(50_000))), PLAIN_MODEL, OURS
        )
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("processor", ["some.module:Processor", type("Processor", (), {})])
def test_custom_processors_exclude(processor: Any) -> None:
    model = SimpleNamespace(logits_processors=[processor])
    with pytest.raises(InvalidRequestError, match=r"logits processor .*Processor"):
        validate_request(asking("typical"), model, OURS)
    validate_request(asking("lossless"), model, OURS)


def test_installed_processors_are_looked_for_where_vllm_does() -> None:
    assert support.LOGITS_PROCESSORS_GROUP == LOGITSPROCS_GROUP


@pytest.mark.parametrize(
    "other", [None, SimpleNamespace(model="m", method="ngram")], ids=["none", "ngram"]
)
def test_engines_without_medusa(other: Any) -> None:
    with pytest.raises(InvalidRequestError, match="does not speculate with Medusa"):
        validate_request(asking("lossless"), PLAIN_MODEL, other)
    validate_request(SamplingParams(extra_args={"other": 1}), PLAIN_MODEL, other)
    validate_request(SamplingParams(), PLAIN_MODEL, other)


def test_the_error_is_both_vllms_and_a_value_error() -> None:
    """vLLM answers 400 to its own kind alone; users of `LLM` expect a ValueError."""
    with pytest.raises(ValueError, match="'medusa'") as caught:
        validate_request(SamplingParams(extra_args={"medusa": 1}), PLAIN_MODEL, OURS)
    assert isinstance(caught.value, VLLMValidationError)
    assert caught.value.parameter == "extra_args"
