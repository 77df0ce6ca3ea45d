"""MedusaConfig: unknown and malformed options fail by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from medusa_plugin.config import MAX_NUM_SPECULATIVE_TOKENS, MedusaConfig, MedusaConfigError
from medusa_plugin.tree.token_tree import MAX_ROWS
from tvm_ops import MAX_TREE_ROWS


def test_defaults() -> None:
    config = MedusaConfig.from_options({"heads": "dir"})
    assert config.num_speculative_tokens is None
    assert config.draft_vocab_size == "auto"
    assert config.acceptance == "lossless"
    assert (config.typical_epsilon, config.typical_alpha) == (0.09, 0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": "d", "treee": 1}, "unknown option 'treee'; the options are: heads"),
        ({}, "option 'heads': Field required"),
        ({"heads": ""}, "option 'heads'"),
        ({"heads": "d", "num_speculative_tokens": 0}, "'num_speculative_tokens'.*got 0"),
        ({"heads": "d", "num_speculative_tokens": 64}, "'num_speculative_tokens'.*got 64"),
        ({"heads": "d", "num_speculative_tokens": "8"}, "'num_speculative_tokens'.*got '8'"),
        ({"heads": "d", "draft_vocab_size": "some"}, "'draft_vocab_size'"),
        ({"heads": "d", "tree": 7}, "option 'tree'"),
        ({"heads": "d", "tree": [["a"]]}, "option 'tree'"),
        ({"heads": "d", "tree": [[True]]}, "option 'tree'"),
        ({"heads": "d", "acceptance": "lossy"}, "'acceptance'.*'lossless' or 'typical'.*'lossy'"),
        ({"heads": "d", "typical_epsilon": 0}, "'typical_epsilon'.*greater than 0, got 0"),
        ({"heads": "d", "typical_epsilon": 1.0}, "'typical_epsilon'.*less than 1, got 1"),
        ({"heads": "d", "typical_epsilon": "0.1"}, "'typical_epsilon'.*got '0.1'"),
        ({"heads": "d", "typical_alpha": 0.0}, "'typical_alpha'.*greater than 0, got 0"),
        ({"heads": "d", "typical_alpha": float("inf")}, "'typical_alpha'.*finite.*got inf"),
        ({"heads": "d", "typical_alpha": float("nan")}, "'typical_alpha'.*got nan"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MedusaConfigError, match=message):
        MedusaConfig.from_options(options)


def test_the_largest_tree_is_what_the_tree_and_the_kernel_hold() -> None:
    assert MAX_NUM_SPECULATIVE_TOKENS == MAX_ROWS - 1 < MAX_TREE_ROWS


def test_frozen() -> None:
    config = MedusaConfig.from_options({"heads": "dir"})
    with pytest.raises(ValidationError):
        config.heads = "other"  # type: ignore[misc]


def test_round_trip_through_json_values() -> None:
    for tree in ([[0], [0, 1]], [(0,), (0, 1)]):
        config = MedusaConfig.from_options({"heads": "d", "tree": tree})
        assert config.tree == tree
        assert MedusaConfig.from_options(config.model_dump()) == config
