"""MLP speculators and Hydra heads against slow loops in float64, written from their definitions."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from medusa_plugin.heads import HeadsError, TargetSpec, load_heads, peek_heads
from medusa_plugin.heads.base import SequentialHeads
from tests.heads.conftest import HIDDEN, VOCAB, Tensors, make_target

INNER = 24
PATH = [5, 17, 39, 0]
"""Tokens from the root on."""
ROW = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(5))


def target() -> TargetSpec:
    generator = torch.Generator().manual_seed(6)
    return replace(make_target(), embedding=torch.randn(VOCAB + 3, HIDDEN, generator=generator))


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def along(heads: Any) -> list[torch.Tensor]:
    """Logits of each head along `PATH`, by the interface."""
    assert isinstance(heads, SequentialHeads)
    state = heads.begin(ROW, torch.tensor(PATH[:1]))
    found = [heads.logits(0, state)[0]]
    for head in range(1, heads.num_heads):
        state = heads.advance(head, state, torch.tensor(PATH[head : head + 1]))
        found.append(heads.logits(head, state)[0])
    return found


def speculator(n: int, *, tied: bool, prefix: str = "") -> Tensors:
    tensors = {}
    for i in range(n):
        j = 0 if tied else i  # the seed: equal ones are one tensor
        width = INNER if i else HIDDEN
        tensors |= {
            f"{prefix}emb.{i}.weight": randn(VOCAB, INNER, seed=10 + j),
            f"{prefix}proj.{i}.weight": randn(INNER, width, seed=30 + (min(i, 1) if tied else i)),
            f"{prefix}head.{i}.weight": randn(VOCAB, INNER, seed=50 + j),
            f"{prefix}ln.{i}.weight": 1 + randn(INNER, seed=70 + j),
            f"{prefix}ln.{i}.bias": randn(INNER, seed=90 + j),
        }
    return tensors


def once(tensors: Tensors) -> Tensors:
    """Tied tensors only where they are first."""
    kept = ("emb.0", "proj.0", "proj.1", "head.0", "ln.0")
    return {n: t for n, t in tensors.items() if n.removeprefix("speculator.").startswith(kept)}


def speculator_loop(tensors: Tensors, n: int, *, scale_input: bool) -> list[torch.Tensor]:
    state = ROW[0].double()
    if scale_input:
        state = state / (state.square().mean() + 1e-6).sqrt() / math.sqrt(2)
    state_weight = 0.5 ** (0.5 / n)
    emb_weight = math.sqrt((1 - state_weight**2) * INNER / 2)
    found = []
    for i in range(n):
        emb = tensors[f"emb.{i}.weight"].double()[PATH[i]]
        z = tensors[f"proj.{i}.weight"].double() @ state
        # As vLLM's V0 did: the norm takes care of the common factor.
        z = z + emb * emb_weight / state_weight
        z = z / (z.square().mean() + 1e-6).sqrt()
        z = z * tensors[f"ln.{i}.weight"].double() + tensors[f"ln.{i}.bias"].double()
        state = z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
        found.append(tensors[f"head.{i}.weight"].double() @ state)
    return found


def write(directory: Path, file: str, tensors: Tensors, config: object) -> Path:
    save_file({name: t.clone() for name, t in tensors.items()}, directory / file)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def mlp_config(n: int, **changes: object) -> dict[str, object]:
    sizes = {"emb_dim": HIDDEN, "inner_dim": INNER, "vocab_size": VOCAB}
    return {"model_type": "mlp_speculator", "n_predict": n, "tie_weights": False} | sizes | changes


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=0)


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("prefix", ["", "speculator."])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("storage", ["untied", "tied", "tied, once"])
def test_speculators_match_the_loop(
    tmp_path: Path, n: int, prefix: str, scale_input: bool, storage: str
) -> None:
    tied = storage != "untied"
    tensors = speculator(n, tied=tied, prefix=prefix)
    stored = once(tensors) if storage == "tied, once" else tensors
    config = mlp_config(n, tie_weights=tied, scale_input=scale_input)
    directory = write(tmp_path, "model.safetensors", stored, config)
    heads = load_heads(directory, make_target(), draft_vocab_size="auto")
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    same(along(heads), speculator_loop(bare, n, scale_input=scale_input))
    info = peek_heads(directory)
    assert (info.kind, info.num_heads, info.vocab_size) == ("mlp_speculator", n, VOCAB)
    assert not info.variant.warnings


def draft_vocab(directory: Path) -> torch.Tensor:
    ids = torch.tensor([9, 2, 31, 0], dtype=torch.int32)
    save_file({"token_ids": ids}, directory / "draft_vocab.safetensors")
    return ids.long()


def test_a_draft_vocabulary_cuts_the_outputs_only(tmp_path: Path) -> None:
    tensors = speculator(3, tied=False)
    directory = write(tmp_path, "model.safetensors", tensors, mlp_config(3))
    ids = draft_vocab(directory)
    heads = load_heads(directory, make_target(), draft_vocab_size=3)
    assert isinstance(heads, SequentialHeads) and heads.draft_vocab is not None
    assert heads.max_top_k == 3 and torch.equal(heads.draft_vocab, ids[:3])
    whole = speculator_loop(tensors, 3, scale_input=False)
    same(along(heads), [logits[ids[:3]] for logits in whole])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("ln.1.bias"), r"tensor ln\.1\.bias is missing"),
        (lambda t: t.update({"qhead.0.weight": ROW}), "unknown tensor 'qhead.0.weight'"),
        (lambda t: t.update({"emb.0.bias": ROW}), "unknown tensor 'emb.0.bias'"),
        (lambda t: t.update({"speculator.emb.0.weight": ROW}), "is there twice"),
        (lambda t: t.update({"proj.1.weight": torch.zeros(INNER, HIDDEN)}), "proj.1.weight has sh"),
        (lambda t: t.update({"proj.0.weight": torch.zeros(INNER)}), "has shape"),
        (lambda t: t.update({"emb.0.weight": torch.zeros(())}), "has shape"),
        (lambda t: t.update({"head.2.weight": t["head.2.weight"].double()}), "has dtype F64"),
        (lambda t: t.update({"emb.99.weight": ROW}), "too many"),
    ],
)
def test_bad_speculators_are_named(tmp_path: Path, change: Any, message: str) -> None:
    tensors = speculator(3, tied=False)
    change(tensors)
    with pytest.raises(HeadsError, match=message):
        peek_heads(write(tmp_path, "model.safetensors", tensors, mlp_config(3)))


@pytest.mark.parametrize("config", [None, mlp_config(3, scale_input="yes")])
def test_a_speculator_needs_its_config(tmp_path: Path, config: object) -> None:
    with pytest.raises(HeadsError, match="scale_input"):
        peek_heads(write(tmp_path, "model.safetensors", speculator(3, tied=False), config))


@pytest.mark.parametrize("n", [0, 1000, "3", None, True])
def test_a_tied_speculators_wild_head_count_is_refused(tmp_path: Path, n: object) -> None:
    config = mlp_config(3, tie_weights=True) | {"n_predict": n}
    with pytest.raises(HeadsError, match="n_predict"):
        peek_heads(write(tmp_path, "model.safetensors", once(speculator(3, tied=True)), config))


def test_a_speculator_for_another_target_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, "model.safetensors", speculator(2, tied=False), mlp_config(2))
    other = replace(make_target(), hidden_size=HIDDEN + 1)
    with pytest.raises(HeadsError, match=f"hidden size {HIDDEN}, but the target has {HIDDEN + 1}"):
        load_heads(directory, other, draft_vocab_size="auto")


def hydra(n: int, layers: int) -> Tensors:
    tensors = {}
    for h in range(n):
        for layer in range(layers):
            width = HIDDEN * (h + 2 if layer == 0 else 1)
            name = f"hydra_mlp.{h}.{layer}.linear"
            tensors[f"{name}.weight"] = randn(HIDDEN, width, seed=100 + 10 * h + layer)
            tensors[f"{name}.bias"] = randn(HIDDEN, seed=200 + 10 * h + layer)
        name = f"hydra_mlp.{h}.0.res_connection"
        tensors[f"{name}.weight"] = randn(HIDDEN, HIDDEN * (h + 2), seed=300 + h)
        tensors[f"{name}.bias"] = randn(HIDDEN, seed=400 + h)
        tensors[f"hydra_lm_head.{h}.weight"] = randn(VOCAB, HIDDEN, seed=500 + h)
        tensors[f"hydra_lm_head.{h}.bias"] = randn(VOCAB, seed=600 + h)
    return tensors


def hydra_loop(tensors: Tensors, n: int, layers: int) -> list[torch.Tensor]:
    embedding = target().embedding
    assert embedding is not None
    double = {name: tensor.double() for name, tensor in tensors.items()}
    found = []
    for h in range(n):
        parts = [ROW[0], *(embedding[token] for token in PATH[: h + 1])]
        x = torch.cat(parts).double()
        for layer in range(layers):
            name = f"hydra_mlp.{h}.{layer}.linear"
            y = double[f"{name}.weight"] @ x + double[f"{name}.bias"]
            if layer == 0:
                name = f"hydra_mlp.{h}.0.res_connection"
                x = double[f"{name}.weight"] @ x + double[f"{name}.bias"]
            x = x + y / (1 + torch.exp(-y))
        found.append(double[f"hydra_lm_head.{h}.weight"] @ x + double[f"hydra_lm_head.{h}.bias"])
    return found


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("prefix", ["", "hydra_head."])
def test_hydra_matches_the_loop(tmp_path: Path, n: int, layers: int, prefix: str) -> None:
    tensors = hydra(n, layers)
    stored = {prefix + name: tensor for name, tensor in tensors.items()}
    # Its authors' files carry the target's embedding along.
    stored[f"{prefix}input_embed_fn.weight"] = torch.zeros(VOCAB, HIDDEN)
    config = {"hydra_num_heads": n, "hydra_num_layers": layers, "grounded_heads": True}
    torch.save(stored, tmp_path / "hydra_lm_head.pt")
    (tmp_path / "config.json").write_text(json.dumps(config))
    heads = load_heads(tmp_path, target(), draft_vocab_size="auto")
    same(along(heads), hydra_loop(tensors, n, layers))
    ids = draft_vocab(tmp_path)
    cut = load_heads(tmp_path, target(), draft_vocab_size=3)
    same(along(cut), [logits[ids[:3]] for logits in hydra_loop(tensors, n, layers)])
    info = peek_heads(tmp_path)
    assert (info.kind, info.num_heads, info.vocab_size) == ("hydra", n, VOCAB)
    assert info.variant.reads_tokens and not info.variant.warnings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"prefix_embeding_layer.layers.0.x": ROW}), "whole prefix"),
        (lambda t: t.update({"hydra_mlp.0.0.norm.weight": ROW}), "unknown tensor 'hydra_mlp.0.0.n"),
        (lambda t: t.pop("hydra_mlp.1.0.res_connection.weight"), "grounded_heads"),
        (lambda t: t.pop("hydra_lm_head.1.bias"), r"hydra_lm_head\.1\.bias is missing"),
        (lambda t: t.update({"hydra_lm_head.7.bias": ROW}), "hydra_lm_head.7.bias does not belong"),
        (lambda t: t.update({"hydra_mlp.1.0.linear.weight": ROW}), "has shape"),
        (lambda t: t.update({"hydra_lm_head.0.weight": torch.zeros(3)}), "has shape"),
    ],
)
def test_bad_hydra_heads_are_named(tmp_path: Path, change: Any, message: str) -> None:
    tensors = hydra(2, 2)
    change(tensors)
    with pytest.raises(HeadsError, match=message):
        peek_heads(write(tmp_path, "hydra_lm_head.safetensors", tensors, None))


@pytest.mark.parametrize(
    "config", [{"hydra_head_arch": "prefix-mlp"}, {"hidden_state_offset": 1}], ids=str
)
def test_hydra_heads_that_read_something_else_are_refused(tmp_path: Path, config: Any) -> None:
    with pytest.raises(HeadsError, match=next(iter(config))):
        peek_heads(write(tmp_path, "hydra_lm_head.safetensors", hydra(2, 1), config))


def test_hydra_needs_the_targets_embedding(tmp_path: Path) -> None:
    directory = write(tmp_path, "hydra_lm_head.safetensors", hydra(2, 1), None)
    with pytest.raises(HeadsError, match="input embedding"):
        load_heads(directory, make_target(), draft_vocab_size="auto")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    tensors = speculator(2, tied=False)
    tensors["ln.1.bias"][2] = value
    directory = write(tmp_path, "model.safetensors", tensors, mlp_config(2))
    with pytest.raises(HeadsError, match=r"ln\.1\.bias has NaN or infinite"):
        load_heads(directory, make_target(), draft_vocab_size="auto")
