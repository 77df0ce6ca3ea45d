"""Per-request control: checked where a request enters, read once where it runs.

| vLLM field | our meaning |
|---|---|
| `SamplingParams.extra_args["medusa"]` (OpenAI server: `vllm_xargs`) | `RequestOptions` |
| `SamplingParams.temperature` | temperature of the typical rule |
| all that changes the distribution besides | excludes typical acceptance (`typical_conflicts`) |
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, SamplingType

from medusa_plugin.request_options import (
    EXTRA_ARGS_KEY,
    RequestOptions,
    RequestOptionsError,
    parse_request_options,
)
from medusa_plugin.vllm_glue.support import custom_processors
from medusa_plugin.vllm_glue.translate import is_medusa

logger = logging.getLogger("vllm.medusa")

# Parameters that make the target's distribution another one than softmax(logits / temperature),
# or report on it token by token, and the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "logprobs": (None,),
    "logprob_token_ids": (None,),
}


class InvalidRequestError(VLLMValidationError, RequestOptionsError):
    """`RequestOptionsError` as the kind that vLLM answers with status 400."""

    def __init__(self, message: str) -> None:
        super().__init__(message, parameter="extra_args")  # type: ignore[call-arg]


@dataclass(frozen=True)
class RequestSettings:
    """What `StepRequest` says of a request in every step."""

    options: RequestOptions
    typical_temperature: float | None


def validate_request(params: SamplingParams, model_config: Any, speculative_config: Any) -> None:
    """Check a request's options in the front end, where a refusal concerns this request alone.

    Raises:
        InvalidRequestError: an option is unknown, malformed, has no effect on this engine, or
            asks for typical acceptance together with a parameter that excludes it.
    """
    if not params.extra_args or EXTRA_ARGS_KEY not in params.extra_args:
        return
    if not is_medusa(speculative_config):
        raise InvalidRequestError(
            f"extra_args[{EXTRA_ARGS_KEY!r}] is given, but this engine does not speculate with "
            "Medusa: leave it out, or start the engine with --speculative-model medusa"
        )
    try:
        options = parse_request_options(params.extra_args)
    except RequestOptionsError as error:
        raise InvalidRequestError(str(error)) from None
    if options.acceptance != "typical" or _is_greedy(params):
        return
    if conflicts := [*typical_conflicts(params), *custom_processors(model_config)]:
        raise InvalidRequestError(
            "acceptance 'typical' judges tokens by softmax(logits / temperature) and cannot be "
            f"combined with {', '.join(conflicts)}: leave this out, or ask for acceptance "
            "'lossless'"
        )


def _is_greedy(params: SamplingParams) -> bool:
    return bool(params.sampling_type == SamplingType.GREEDY)


def typical_conflicts(params: SamplingParams) -> list[str]:
    """The parameters of a request that exclude typical acceptance, with their values."""
    values = {name: getattr(params, name) for name in _NEUTRAL}
    return [
        f"{name}={reprlib.repr(value)}"
        for name, value in values.items()
        if value not in _NEUTRAL[name]
    ]


class RunningRequests:
    """Settings of the requests that a worker runs, each read once.

    Args:
        default_acceptance: of requests that do not say.
    """

    def __init__(self, default_acceptance: Literal["lossless", "typical"]) -> None:
        self._default_acceptance = default_acceptance
        self._settings: dict[str, RequestSettings] = {}
        self._told: set[str] = set()

    def settings(self, request_id: str, params: SamplingParams) -> RequestSettings:
        """The settings of a running request."""
        known = self._settings.get(request_id)
        if known is None:
            known = self._settings[request_id] = self._read(request_id, params)
        return known

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests that ended, or whose parameters are new."""
        for request_id in request_ids:
            self._settings.pop(request_id, None)

    def _read(self, request_id: str, params: SamplingParams) -> RequestSettings:
        try:
            options = parse_request_options(params.extra_args)
        except RequestOptionsError as error:
            # The front end refuses such requests; one that came around it must not end the engine.
            logger.error("request %s: its options are ignored: %s", request_id, error)
            options = RequestOptions()
        acceptance = options.acceptance or self._default_acceptance
        typical = acceptance == "typical" and not _is_greedy(params)
        if typical and (conflicts := typical_conflicts(params)):
            self._tell_once(request_id, conflicts)
            typical = False
        return RequestSettings(options, params.temperature if typical else None)

    def _tell_once(self, request_id: str, conflicts: list[str]) -> None:
        names = {conflict.split("=")[0] for conflict in conflicts}
        if names <= self._told:
            return
        self._told |= names
        logger.warning(
            "request %s is accepted losslessly although typical acceptance is on: it has %s; this "
            "is said once per parameter",
            request_id,
            ", ".join(conflicts),
        )
