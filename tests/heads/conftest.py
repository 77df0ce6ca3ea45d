"""Random heads of every layout, written to a directory as their makers would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from medusa_plugin.heads import TargetSpec

HIDDEN = 16
VOCAB = 40
Tensors = dict[str, torch.Tensor]
HeadsWriter = Callable[..., Path]


def make_tensors(
    num_heads: int = 3,
    num_layers: int = 2,
    *,
    own: bool = False,
    bias: bool = True,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    prefix: str = "",
) -> Tensors:
    generator = torch.Generator().manual_seed(7)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.4

    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = randn(hidden, hidden)
            if bias:
                tensors[f"{prefix}{head}.{layer}.linear.bias"] = randn(hidden)
        if own:
            tensors[f"{prefix}{head}.{num_layers}.weight"] = randn(vocab, hidden)
    return tensors


def make_target(dtype: torch.dtype = torch.float32, padding: int = 0) -> TargetSpec:
    """A target whose padding rows would win every top-k if they were looked at."""
    generator = torch.Generator().manual_seed(8)
    lm_head = torch.randn(VOCAB + padding, HIDDEN, generator=generator)
    lm_head[VOCAB:] = 1000.0
    return TargetSpec(HIDDEN, VOCAB, lm_head.to(dtype), dtype, torch.device("cpu"))


@pytest.fixture
def write_heads(tmp_path: Path) -> HeadsWriter:
    """Write tensors, and optionally the files beside them; returns the directory."""

    def write(
        tensors: Tensors,
        *,
        config: object = None,
        calibration: object = None,
        draft_vocab: list[int] | None = None,
        pickled: bool = False,
    ) -> Path:
        if pickled:
            torch.save(tensors, tmp_path / "medusa_lm_head.pt")
        else:
            save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        if calibration is not None:
            (tmp_path / "calibration.json").write_text(json.dumps(calibration))
        if draft_vocab is not None:
            ids = torch.tensor(draft_vocab, dtype=torch.int32)
            save_file({"token_ids": ids}, tmp_path / "draft_vocab.safetensors")
        return tmp_path

    return write
