"""RequestOptions: what a request may ask, and how what it may not is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from medusa_plugin import request_options
from medusa_plugin.request_options import (
    RequestOptions,
    RequestOptionsError,
    parse_request_options,
)


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {"medusa": {}}, {"medusa": "{}"}])
def test_nothing_asked(extra_args: Any) -> None:
    assert parse_request_options(extra_args) == RequestOptions()


@pytest.mark.parametrize(
    "asked",
    [
        {"enabled": False},
        {"enabled": True, "max_nodes": 1},
        {"max_nodes": 63, "acceptance": "typical"},
        {"max_nodes": None, "acceptance": None},
        {"acceptance": "lossless"},
    ],
)
def test_a_mapping_and_its_json_text_say_the_same(asked: dict[str, Any]) -> None:
    options = parse_request_options({"medusa": asked, "other": 1})
    assert options.model_dump(include=set(asked)) == asked
    assert parse_request_options({"medusa": json.dumps(asked)}) == options


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"enable": False}, "unknown option 'enable'.*enabled.*max_nodes.*acceptance"),
        ({1: 2}, "unknown option '1'"),
        ({"enabled": 0}, "'enabled' is true or false, got 0"),
        ({"enabled": None}, "'enabled' is true or false, got None"),
        ({"max_nodes": 0}, "'max_nodes' is a whole number from 1 to 63.*got 0"),
        ({"max_nodes": 64}, "'max_nodes'.*got 64"),
        ({"max_nodes": 2.0}, "'max_nodes'.*got 2.0"),
        ({"max_nodes": True}, "'max_nodes'.*got True"),
        ({"max_nodes": "5"}, "'max_nodes'.*got '5'"),
        ({"acceptance": "Typical"}, "'acceptance' is 'lossless', 'typical' or null, got 'Typical'"),
        ({"enabled": 1, "max_nodes": -1}, "'enabled'.*; option 'max_nodes'.*got -1"),
        (7, "must be an object or its JSON text.*enabled.*got 7"),
        (None, "must be an object.*got None"),
        ([["enabled", False]], "must be an object"),
        ("", "is not JSON.*got ''"),
        ("{'enabled': false}", "is not JSON"),
        ("[]", "must be an object"),
        ('"{}"', "must be an object"),
        ('{"max_nodes": 99}', "'max_nodes'.*got 99"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_bad_values_are_named_with_what_is_allowed(asked: Any, message: str) -> None:
    with pytest.raises(RequestOptionsError, match=message) as caught:
        parse_request_options({"medusa": asked})
    assert str(caught.value).startswith("extra_args['medusa']")


def test_every_option_says_what_is_allowed() -> None:
    assert list(request_options._ALLOWED) == list(RequestOptions.model_fields)


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        RequestOptions().enabled = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (RequestOptions(), 15),
        (RequestOptions(max_nodes=4), 4),
        (RequestOptions(max_nodes=40), 15),
        (RequestOptions(enabled=False), 0),
        (RequestOptions(enabled=False, max_nodes=4), 0),
    ],
)
def test_node_limit_is_a_ceiling(options: RequestOptions, limit: int) -> None:
    assert options.node_limit(15) == limit
