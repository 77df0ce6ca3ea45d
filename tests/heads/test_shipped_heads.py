"""The heads in the package are complete, and their files agree with each other."""

from __future__ import annotations

from pathlib import Path

import torch

import medusa_plugin
from medusa_plugin.heads import AUTO_DRAFT_VOCAB_SIZE, TargetSpec, load_heads, peek_heads
from medusa_plugin.tree.static import choose_tree

SHIPPED = Path(medusa_plugin.__file__).parent / "assets" / "smollm2-135m-medusa"
VOCAB, HIDDEN = 49152, 576


def test_all_files_describe_the_same_heads() -> None:
    info = peek_heads(SHIPPED)
    info.require_target(hidden_size=HIDDEN, vocab_size=VOCAB)
    assert info.describe() == "4 Medusa heads, 1 layer, shared lm head"
    assert info.draft_vocab_ranked == 16384
    assert info.accuracies is not None
    for row in info.accuracies:
        assert sum(row) <= 1  # at most one candidate is right
        assert row[0] == max(row)
    assert 0.3 < info.accuracies[0][0] < 0.45
    # Those of the tuning are where the path before is right; these are of all tokens.
    untuned = peek_heads(SHIPPED, use_tuning=False).accuracies
    assert untuned is not None
    best = [row[0] for row in untuned]
    assert best == sorted(best, reverse=True)
    assert 0.3 < best[0] < 0.45


def test_they_load_with_the_default_draft_vocabulary() -> None:
    lm_head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    target = TargetSpec(HIDDEN, VOCAB, lm_head.bfloat16(), torch.bfloat16, torch.device("cpu"))
    heads = load_heads(SHIPPED, target, draft_vocab_size="auto")
    assert heads.max_top_k == AUTO_DRAFT_VOCAB_SIZE
    got = heads.propose(torch.ones(2, HIDDEN).bfloat16(), torch.zeros(2, dtype=torch.int64), 10)
    assert got.token_ids.shape == (2, 4, 10)
    assert torch.isfinite(got.log_probs).all()


def test_their_default_tree_branches_and_uses_every_depth_that_pays() -> None:
    accuracies = peek_heads(SHIPPED).accuracies
    tree = choose_tree("static", num_heads=4, num_nodes=15, accuracies=accuracies)
    assert tree.num_nodes == 15
    assert not tree.is_chain
    assert max(tree.depths) >= 2
