"""Loads a target whose own files hold heads too: vLLM would refuse names that it does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vllm.config import get_current_vllm_config_or_none

from medusa_plugin.heads.source import MERGED_PREFIXES
from medusa_plugin.vllm_glue.translate import is_medusa


def without_heads(
    original: Callable[..., Iterator[tuple[str, Any]]], *args: Any, **kwargs: Any
) -> Iterator[tuple[str, Any]]:
    """The target's weights, without the heads among them in an engine of ours."""
    weights = original(*args, **kwargs)
    config = get_current_vllm_config_or_none()
    if config is None or not is_medusa(config.speculative_config):
        return weights
    return (entry for entry in weights if not entry[0].startswith(MERGED_PREFIXES))
