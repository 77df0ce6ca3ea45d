"""RequestOptions: what one request may ask of Medusa, apart from the engine's configuration.

They are given under the key "medusa" of `SamplingParams.extra_args`, as a mapping or as its JSON
text: the OpenAI server's field `vllm_xargs` takes no nested objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from medusa_plugin.config import MAX_NUM_SPECULATIVE_TOKENS

EXTRA_ARGS_KEY = "medusa"

_ALLOWED = {
    "enabled": "true or false",
    "max_nodes": f"a whole number from 1 to {MAX_NUM_SPECULATIVE_TOKENS}, or null",
    "acceptance": "'lossless', 'typical' or null",
}


class RequestOptionsError(ValueError):
    """A request's options are unknown, malformed or without effect; the message names them."""


class RequestOptions(BaseModel):
    """How one request is speculated on."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    enabled: bool = True
    """False: nothing is drafted for this request."""

    max_nodes: int | None = Field(default=None, ge=1, le=MAX_NUM_SPECULATIVE_TOKENS)
    """At most so many nodes per tree. A ceiling: above the engine's own it changes nothing."""

    acceptance: Literal["lossless", "typical"] | None = None
    """Acceptance rule; "typical" is lossy. None: the engine's default."""

    def node_limit(self, most: int) -> int:
        """Nodes that a tree may have, of the `most` that there could be."""
        if not self.enabled:
            return 0
        return most if self.max_nodes is None else min(most, self.max_nodes)


def parse_request_options(extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """The options in a request's `extra_args`; the defaults where it has none.

    Raises:
        RequestOptionsError: names what was got and what is allowed.
    """
    if extra_args is None or EXTRA_ARGS_KEY not in extra_args:
        return RequestOptions()
    given = extra_args[EXTRA_ARGS_KEY]
    options = _from_json(given) if isinstance(given, str) else given
    if not isinstance(options, Mapping):
        raise RequestOptionsError(
            f"extra_args[{EXTRA_ARGS_KEY!r}] must be an object or its JSON text with the options "
            f"{_options()}; got {given!r}"
        )
    try:
        return RequestOptions.model_validate(dict(options))
    except ValidationError as error:
        raise RequestOptionsError(_explain(error)) from None


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    # Deep nesting exhausts the stack of the parser.
    except (ValueError, RecursionError) as error:
        raise RequestOptionsError(
            f"extra_args[{EXTRA_ARGS_KEY!r}] is not JSON ({error}), got {text!r}"
        ) from None


def _options() -> str:
    return ", ".join(f"{name} ({allowed})" for name, allowed in _ALLOWED.items())


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else "?"
        if name in _ALLOWED:
            lines.append(f"option {name!r} is {_ALLOWED[name]}, got {item['input']!r}")
        else:
            lines.append(f"unknown option {name!r}; the options are: {_options()}")
    return f"extra_args[{EXTRA_ARGS_KEY!r}]: " + "; ".join(dict.fromkeys(lines))
