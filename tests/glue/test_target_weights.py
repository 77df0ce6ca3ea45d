"""A target's own shards may hold heads: ours leave them out, other engines see them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from medusa_plugin.vllm_glue import target_weights
from medusa_plugin.vllm_glue.translate import PROPOSER

NAMES = [
    "model.norm.weight",
    "medusa_head.0.0.linear.weight",
    "medusa_heads.1.lm_head.weight",
    "lm_head.weight",
    "model.medusa_head.weight",
]


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (None, NAMES),
        (SimpleNamespace(speculative_config=None), NAMES),
        (SimpleNamespace(speculative_config=SimpleNamespace(model="eagle")), NAMES),
        (
            SimpleNamespace(speculative_config=SimpleNamespace(model=PROPOSER)),
            [NAMES[0], NAMES[3], NAMES[4]],
        ),
    ],
    ids=["no engine", "plain", "another method", "medusa"],
)
def test_only_our_engines_leave_heads_out(
    monkeypatch: pytest.MonkeyPatch, config: Any, kept: list[str]
) -> None:
    monkeypatch.setattr(target_weights, "get_current_vllm_config_or_none", lambda: config)
    weights = target_weights.without_heads(lambda: iter([(name, None) for name in NAMES]))
    assert [name for name, _ in weights] == kept
