"""The heads in the package are complete, and their files agree with each other."""

from __future__ import annotations

from pathlib import Path

import torch

import medusa_plugin
from medusa_plugin.heads import AUTO_DRAFT_VOCAB_SIZE, TargetSpec, load_heads, peek_heads
from medusa_plugin.heads.base import SequentialHeads
from medusa_plugin.tree.static import choose_tree

SHIPPED = Path(medusa_plugin.__file__).parent / "assets" / "smollm2-135m-medusa"
VOCAB, HIDDEN = 49152, 576


def test_all_files_describe_the_same_heads() -> None:
    info = peek_heads(SHIPPED)
    info.require_target(hidden_size=HIDDEN, vocab_size=VOCAB)
    assert info.describe().startswith("4 recurrent heads")
    assert info.draft_vocab_ranked == AUTO_DRAFT_VOCAB_SIZE
    assert info.tuning is not None and info.tuning.draft_vocab_size == AUTO_DRAFT_VOCAB_SIZE
    assert info.accuracies is not None
    for row in info.accuracies:
        assert sum(row) <= 1  # at most one candidate is right
        assert row[0] == max(row) > 0.5
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 7_000_000


def test_they_load_with_the_default_draft_vocabulary() -> None:
    lm_head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    cpu = torch.device("cpu")
    target = TargetSpec(HIDDEN, VOCAB, lm_head, torch.bfloat16, cpu, embedding=lm_head)
    heads = load_heads(SHIPPED, target, draft_vocab_size="auto")
    assert isinstance(heads, SequentialHeads)
    assert (heads.num_heads, heads.max_top_k) == (4, AUTO_DRAFT_VOCAB_SIZE)
    state = heads.begin(torch.ones(2, HIDDEN).bfloat16(), torch.zeros(2, dtype=torch.int64))
    for head in range(4):
        logits = heads.logits(head, state)
        assert logits.shape == (2, AUTO_DRAFT_VOCAB_SIZE) and bool(torch.isfinite(logits).all())
        if head < 3:
            state = heads.advance(head + 1, state, torch.ones(2, dtype=torch.int64))


def test_their_default_tree_branches_and_uses_every_depth_that_pays() -> None:
    accuracies = peek_heads(SHIPPED).accuracies
    tree = choose_tree("static", num_heads=4, num_nodes=15, accuracies=accuracies)
    assert tree.num_nodes == 15
    assert not tree.is_chain
    assert max(tree.depths) >= 2
