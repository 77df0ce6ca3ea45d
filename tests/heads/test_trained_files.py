"""Heads in our own format: what was saved is what runs; what does not fit is named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_plugin.heads import HeadsError, TargetSpec, load_heads, peek_heads
from medusa_plugin.heads.base import SequentialHeads
from medusa_plugin.heads.conditioned import ConditionedHeads
from medusa_plugin.heads.trained import Kind, TrainedConfig
from medusa_plugin.heads.trained_files import TrainedHeads, build_trained, save_trained
from tests.heads.conftest import HIDDEN, VOCAB, make_target

RANKING = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2))
TOKENS = torch.tensor([3, 0, 39, 7])


def target(dtype: torch.dtype = torch.float32) -> TargetSpec:
    made = make_target(dtype, padding=3)
    generator = torch.Generator().manual_seed(6)
    embedding = torch.randn(VOCAB + 3, HIDDEN, generator=generator).to(dtype)
    return replace(made, embedding=embedding)


def config_of(kind: Kind, rank: int) -> TrainedConfig:
    return TrainedConfig(
        kind=kind,
        num_heads=3,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        width=20,
        output_rank=rank,
        draft_vocab_size=9,
    )


def save(
    directory: Path, kind: Kind, rank: int, dtype: torch.dtype = torch.float32
) -> TrainedHeads:
    """Write random heads and return them, over the whole of their table."""
    config = config_of(kind, rank)
    torch.manual_seed(11)
    heads = build_trained(config, target(), RANKING[:9])
    with torch.no_grad():
        for tensor in heads.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) * 0.4)
    save_trained(directory, config, heads, RANKING, dtype)
    return heads.requires_grad_(False)


def logits(heads: Any) -> list[torch.Tensor]:
    if isinstance(heads, ConditionedHeads):
        return list(heads.all_logits(ROWS, TOKENS))
    assert isinstance(heads, SequentialHeads)
    state = heads.begin(ROWS, TOKENS)
    found = [heads.logits(0, state)]
    for head in range(1, heads.num_heads):
        state = heads.advance(head, state, TOKENS.roll(head))
        found.append(heads.logits(head, state))
    return found


KINDS = pytest.mark.parametrize("kind", ["conditioned", "recurrent"])


@KINDS
@pytest.mark.parametrize("rank", [0, 6])
@pytest.mark.parametrize("size", [9, 4, "auto", "full"])
def test_what_was_saved_runs(tmp_path: Path, kind: Kind, rank: int, size: Any) -> None:
    expected = logits(save(tmp_path, kind, rank))
    heads = load_heads(tmp_path, target(), draft_vocab_size=size)
    whole_vocabulary = rank == 0 and size == "full"
    known = {9: 9, 4: 4, "full": 9, "auto": 9 if rank else VOCAB}
    rows = VOCAB if whole_vocabulary else known[size]
    assert heads.max_top_k == rows
    vocab = heads.draft_vocab  # type: ignore[attr-defined]
    assert vocab is None if whole_vocabulary else torch.equal(vocab, RANKING[:rows])
    for got, wanted in zip(logits(heads), expected, strict=True):
        columns = got[:, RANKING[:9]] if whole_vocabulary else got[:, :9]
        torch.testing.assert_close(columns, wanted[:, :rows], atol=1e-5, rtol=0)


@KINDS
def test_headers_tell_the_structure(tmp_path: Path, kind: Kind) -> None:
    save(tmp_path, kind, 6)
    info = peek_heads(tmp_path)
    assert (info.kind, info.num_heads, info.hidden_size) == (kind, 3, HIDDEN)
    assert (info.vocab_size, info.draft_vocab_ranked) == (VOCAB, 9)
    assert info.variant.reads_tokens
    assert info.describe() == f"3 {kind} heads, width 20, own table of 9 tokens, rank 6"


@KINDS
def test_weights_come_in_the_targets_dtype(tmp_path: Path, kind: Kind) -> None:
    save(tmp_path, kind, 6)
    heads = load_heads(tmp_path, target(torch.bfloat16), draft_vocab_size="auto")
    assert isinstance(heads, torch.nn.Module) and not heads.training
    assert {tensor.dtype for tensor in heads.state_dict().values()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in heads.parameters())
    assert not any(tensor.is_meta for tensor in (*heads.parameters(), *heads.buffers()))


def test_a_draft_vocabulary_beyond_the_table_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "recurrent", 6)
    with pytest.raises(HeadsError, match=r"draft_vocab_size is 10, but .* ranks 9 token ids"):
        load_heads(tmp_path, target(), draft_vocab_size=10)


def test_a_target_without_an_embedding_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "recurrent", 6)
    with pytest.raises(HeadsError, match="input embedding"):
        load_heads(tmp_path, make_target(), draft_vocab_size="auto")


def test_another_target_is_refused_with_both_numbers(tmp_path: Path) -> None:
    save(tmp_path, "recurrent", 6)
    other = replace(target(), vocab_size=VOCAB - 1)
    with pytest.raises(HeadsError, match=f"vocabulary of {VOCAB}, but the target has {VOCAB - 1}"):
        load_heads(tmp_path, other, draft_vocab_size="auto")


NAME = "state.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), f"tensor {NAME} is missing from recurrent heads"),
        (lambda t: t.update({"x" * 500: torch.ones(1)}), "unknown tensor 'xxx"),
        (lambda t: t.update({NAME: torch.zeros(6, 21)}), r"shape \[6, 21\], expected \[6, 20\]"),
        (lambda t: t.update({NAME: torch.zeros(())}), r"shape \[\], expected"),
        (lambda t: t.update({NAME: t[NAME].to(torch.float8_e4m3fn)}), "dtype F8_E4M3"),
        (lambda t: t.update({NAME: t[NAME].to(torch.int64)}), "dtype I64"),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)
def test_bad_tensors_are_named(tmp_path: Path, change: Any, message: str) -> None:
    save(tmp_path, "recurrent", 6)
    tensors = load_file(tmp_path / "heads.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "heads.safetensors")
    with pytest.raises(HeadsError, match=message) as error:
        peek_heads(tmp_path)
    assert str(tmp_path) in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("name", [NAME, "inputs.scale", "inputs.embedding_scale", "output.table"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_values_that_are_not_finite_are_named(tmp_path: Path, name: str, value: float) -> None:
    save(tmp_path, "recurrent", 6)
    tensors = load_file(tmp_path / "heads.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, tmp_path / "heads.safetensors")
    with pytest.raises(HeadsError, match=f"{name} has NaN or infinite"):
        load_heads(tmp_path, target(), draft_vocab_size="auto")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "fancy"}, "kind"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": "many"}, "num_heads"),
        ({"width": -1}, "width"),
        ({"version": 2}, "version"),
        ({"model_type": "llama"}, "model_type"),
        ({"surprise": 1}, "surprise"),
        ({"width": 21}, "has shape"),
        ({"width": 1 << 40}, "has shape|too large"),
        ({"width": 1 << 62}, "no such heads"),
        ({"width": 1 << 80}, "no such heads"),
        ({"draft_vocab_size": 41}, "has shape"),
    ],
    ids=str,
)
def test_a_bad_config_is_named(tmp_path: Path, change: dict[str, object], named: str) -> None:
    save(tmp_path, "recurrent", 6)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(HeadsError, match=named) as error:
        peek_heads(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    save(tmp_path, "recurrent", 6)
    vocabulary, config = tmp_path / "draft_vocab.safetensors", tmp_path / "config.json"
    text = config.read_text()
    for broken, message in (("", "is not readable JSON"), ("[]", "expected a JSON object")):
        config.write_text(broken)
        with pytest.raises(HeadsError, match=message):
            peek_heads(tmp_path)
    config.unlink()
    with pytest.raises(HeadsError, match=r"config\.json is missing"):
        peek_heads(tmp_path)
    config.write_text(text)
    save_file({"token_ids": torch.arange(8, dtype=torch.int32)}, vocabulary)
    with pytest.raises(HeadsError, match="ranks 8 token ids, but the heads' output table is for 9"):
        peek_heads(tmp_path)
    vocabulary.unlink()
    with pytest.raises(HeadsError, match="ranks 0 token ids"):
        peek_heads(tmp_path)
    (tmp_path / "heads.safetensors").write_bytes(b"junk")
    with pytest.raises(HeadsError, match="not a readable safetensors file"):
        peek_heads(tmp_path)
