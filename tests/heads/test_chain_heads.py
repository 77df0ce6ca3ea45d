"""Our heads in the layout of vLLM's own chain: names, shapes, values and settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from decode.chain_heads import CONFIG_FILE, WEIGHTS_FILE, export_chain_heads
from safetensors.torch import load_file, save_file

from medusa_plugin.heads import HeadsError
from tests.heads.conftest import HIDDEN, VOCAB, HeadsWriter, make_target, make_tensors

LM_HEAD = make_target(torch.bfloat16).lm_head


def write_model(tmp_path: Path, **tensors: torch.Tensor) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    save_file({name.replace("__", "."): t for name, t in tensors.items()}, model / "m.safetensors")
    return model


def export(heads: Path, model: Path, tmp_path: Path) -> tuple[int, dict, dict]:
    out = tmp_path / "chain"
    out.mkdir()
    count = export_chain_heads(heads, model, out)
    return count, load_file(out / WEIGHTS_FILE), json.loads((out / CONFIG_FILE).read_text())


def test_shared_head_over_the_draft_vocabulary(tmp_path: Path, write_heads: HeadsWriter) -> None:
    ours = make_tensors(3, 2)
    heads = write_heads(ours)
    ranked = torch.tensor([7, 3, 0, 39], dtype=torch.int32)
    save_file({"token_ids": ranked}, heads / "draft_vocab.safetensors")
    model = write_model(tmp_path, model__embed_tokens__weight=LM_HEAD)
    count, tensors, config = export(heads, model, tmp_path)
    assert count == 3
    blocks = [f"blocks.{h}.layers.{n}.{p}" for h in range(3) for n in range(2)
              for p in ("weight", "bias")]  # fmt: skip
    assert sorted(tensors) == sorted([*blocks, "lm_heads.0.weight", "token_map"])
    for head in range(3):
        for part in ("weight", "bias"):
            expected = ours[f"{head}.1.linear.{part}"].bfloat16()
            assert torch.equal(tensors[f"blocks.{head}.layers.1.{part}"], expected)
    assert tensors["token_map"].tolist() == [7, 3, 0, 39]
    assert torch.equal(tensors["lm_heads.0.weight"], LM_HEAD[[7, 3, 0, 39]])
    assert config == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "truncated_vocab_size": 4,
        "num_heads": 3,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": True,
    }


def test_heads_without_a_ranking_share_the_whole_head(
    tmp_path: Path, write_heads: HeadsWriter
) -> None:
    other = torch.zeros(VOCAB, HIDDEN)
    model = write_model(tmp_path, lm_head__weight=LM_HEAD, model__embed_tokens__weight=other)
    _, tensors, config = export(write_heads(make_tensors(2, 1, bias=False)), model, tmp_path)
    assert torch.equal(tensors["lm_heads.0.weight"], LM_HEAD), "not the embedding"
    assert "token_map" not in tensors and not any("bias" in name for name in tensors)
    assert config["truncated_vocab_size"] == VOCAB and not config["medusa_fc_bias"]


def test_heads_with_their_own_keep_them_whole(tmp_path: Path, write_heads: HeadsWriter) -> None:
    ours = make_tensors(2, 1, own=True)
    heads = write_heads(ours)
    save_file({"token_ids": torch.arange(4, dtype=torch.int32)}, heads / "draft_vocab.safetensors")
    model = write_model(tmp_path, lm_head__weight=LM_HEAD)
    _, tensors, config = export(heads, model, tmp_path)
    for head in range(2):
        assert torch.equal(tensors[f"lm_heads.{head}.weight"], ours[f"{head}.1.weight"].bfloat16())
    assert "token_map" not in tensors
    assert not config["original_lm_head"] and config["truncated_vocab_size"] == VOCAB


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"norm": LM_HEAD}, "no lm_head.weight or model.embed_tokens.weight"),
        ({"lm_head__weight": LM_HEAD[:, :8]}, "the heads have hidden size 16"),
    ],
)
def test_a_model_that_does_not_fit_is_named(
    tmp_path: Path, write_heads: HeadsWriter, tensors: dict[str, torch.Tensor], message: str
) -> None:
    model = write_model(tmp_path, **{name: t.contiguous() for name, t in tensors.items()})
    with pytest.raises(HeadsError, match=message):
        export_chain_heads(write_heads(make_tensors()), model, tmp_path)
