"""The batched pass against one head, one row and one layer at a time."""

from __future__ import annotations

import pytest
import torch

from medusa_plugin.heads import Candidates, TargetSpec, load_heads
from tests.heads.conftest import (
    HIDDEN,
    VOCAB,
    HeadsWriter,
    Tensors,
    make_target,
    make_tensors,
)

TOKENS = torch.zeros(5, dtype=torch.int64)


def naive_log_probs(tensors: Tensors, target: TargetSpec, hidden: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, vocab]` in float64, straight from the definition."""
    num_heads = 1 + max(int(key.split(".")[0]) for key in tensors)
    num_layers = 1 + max(int(key.split(".")[1]) for key in tensors if "linear" in key)
    rows = []
    for state in hidden.double():
        heads = []
        for head in range(num_heads):
            x = state
            for layer in range(num_layers):
                y = tensors[f"{head}.{layer}.linear.weight"].double() @ x
                if f"{head}.{layer}.linear.bias" in tensors:
                    y = y + tensors[f"{head}.{layer}.linear.bias"].double()
                x = x + y / (1 + torch.exp(-y))
            lm_head = tensors.get(f"{head}.{num_layers}.weight", target.lm_head[:VOCAB])
            logits = lm_head.double() @ x
            heads.append(logits - torch.log(torch.exp(logits - logits.max()).sum()) - logits.max())
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def assert_same(got: Candidates, log_probs: torch.Tensor, top_k: int, atol: float = 1e-4) -> None:
    assert got.token_ids.dtype == torch.int64
    assert got.log_probs.dtype == torch.float32
    expected = log_probs.topk(top_k, dim=-1)
    assert got.token_ids.shape == expected.indices.shape
    torch.testing.assert_close(got.log_probs.double(), expected.values, atol=atol, rtol=0)
    torch.testing.assert_close(
        log_probs.gather(-1, got.token_ids), expected.values, atol=atol, rtol=0
    )
    for batch in got.token_ids.tolist():
        assert all(len(set(head)) == top_k for head in batch)


@pytest.mark.parametrize("own", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize(("num_heads", "num_layers"), [(1, 1), (3, 2), (5, 3)])
@pytest.mark.parametrize("batch", [1, 5])
def test_matches_the_naive_loop(
    write_heads: HeadsWriter, own: bool, bias: bool, num_heads: int, num_layers: int, batch: int
) -> None:
    # Heads and rows swapped, a transposed weight, a dropped bias or layer: all differ here.
    tensors = make_tensors(num_heads, num_layers, own=own, bias=bias)
    target = make_target(padding=3)
    heads = load_heads(write_heads(tensors), target, draft_vocab_size="auto")
    hidden = torch.randn(batch, HIDDEN, generator=torch.Generator().manual_seed(9))
    got = heads.propose(hidden, TOKENS[:batch], 6)
    assert (heads.num_heads, heads.max_top_k) == (num_heads, VOCAB)
    assert_same(got, naive_log_probs(tensors, target, hidden), 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own", [False, True])
def test_half_precision_stays_near(write_heads: HeadsWriter, dtype: torch.dtype, own: bool) -> None:
    tensors = {name: value.to(dtype) for name, value in make_tensors(own=own).items()}
    target = make_target(dtype)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)
    heads = load_heads(write_heads(tensors), target, draft_vocab_size="full")
    # Logits reach about 30; bf16 has 8 bits of significand, fp16 has 11.
    atol = 0.6 if dtype == torch.bfloat16 else 0.08
    got = heads.propose(hidden, TOKENS, 4)
    assert_same(got, naive_log_probs(tensors, target, hidden), 4, atol)


@pytest.mark.parametrize("own", [False, True], ids=["tied", "untied"])
def test_a_draft_vocabulary_maps_back_to_target_ids(write_heads: HeadsWriter, own: bool) -> None:
    tensors, target = make_tensors(own=own), make_target(padding=2)
    ranked = [39, 0, 17, 4, 21, 3, 30, 8]
    directory = write_heads(tensors, draft_vocab=ranked)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9))
    full = naive_log_probs(tensors, target, hidden)
    for size, kept in ((5, ranked[:5]), ("auto", ranked)):
        heads = load_heads(directory, target, draft_vocab_size=size)  # type: ignore[arg-type]
        assert heads.max_top_k == len(kept)
        outside = torch.ones(VOCAB, dtype=torch.bool)
        outside[kept] = False
        # Normalised over the draft vocabulary, as documented.
        log_probs = full.masked_fill(outside, float("-inf")).log_softmax(-1)
        got = heads.propose(hidden, TOKENS, 4)
        assert set(got.token_ids.flatten().tolist()) <= set(kept)
        assert_same(got, log_probs, 4)
    assert load_heads(directory, target, draft_vocab_size="full").max_top_k == VOCAB


def test_layers_that_are_equal_copies_are_applied_twice(write_heads: HeadsWriter) -> None:
    # Heads trained with one block repeated hold the same tensor under two layers.
    tensors = make_tensors(num_layers=2)
    for name in list(tensors):
        head, layer, rest = name.split(".", 2)
        if layer == "1":
            tensors[name] = tensors[f"{head}.0.{rest}"].clone()
    hidden = torch.randn(2, HIDDEN)
    target = make_target()
    heads = load_heads(write_heads(tensors), target, draft_vocab_size="full")
    got = heads.propose(hidden, TOKENS[:2], 3)
    assert_same(got, naive_log_probs(tensors, target, hidden), 3)


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads.", "heads."])
def test_known_prefixes_are_read(write_heads: HeadsWriter, prefix: str) -> None:
    target, hidden = make_target(), torch.randn(2, HIDDEN)
    heads = load_heads(
        write_heads(make_tensors(own=True, prefix=prefix)), target, draft_vocab_size="full"
    )
    expected = naive_log_probs(make_tensors(own=True), target, hidden)
    assert_same(heads.propose(hidden, TOKENS[:2], 3), expected, 3)


def test_a_batch_of_none_gives_none(write_heads: HeadsWriter) -> None:
    heads = load_heads(write_heads(make_tensors()), make_target(), draft_vocab_size="full")
    got = heads.propose(torch.zeros(0, HIDDEN), TOKENS[:0], 3)
    assert got.token_ids.shape == got.log_probs.shape == (0, 3, 3)


@pytest.mark.parametrize("top_k", [0, VOCAB + 1])
def test_top_k_out_of_range_is_refused(write_heads: HeadsWriter, top_k: int) -> None:
    heads = load_heads(write_heads(make_tensors()), make_target(), draft_vocab_size="full")
    with pytest.raises(ValueError, match=f"top_k is {top_k}, expected 1 to {VOCAB}"):
        heads.propose(torch.zeros(1, HIDDEN), TOKENS[:1], top_k)


def test_hidden_states_of_another_width_are_refused(write_heads: HeadsWriter) -> None:
    heads = load_heads(write_heads(make_tensors()), make_target(), draft_vocab_size="full")
    with pytest.raises(ValueError, match=r"shape \[1, 17\], expected \[batch, 16\]"):
        heads.propose(torch.zeros(1, 17), TOKENS[:1], 2)
