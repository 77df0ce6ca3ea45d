"""Trees of heads that read the path, against an enumeration of all paths."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from medusa_plugin import growth
from medusa_plugin.growth import Growth, propose_along
from medusa_plugin.heads.base import SequentialHeads, TargetSpec
from medusa_plugin.heads.trained import TrainedConfig
from medusa_plugin.heads.trained_files import build_trained
from medusa_plugin.static_nodes import StaticNodes
from medusa_plugin.tree.dynamic import Branches, RankedNodes, rank_nodes
from medusa_plugin.tree.estimate import HeadCalibration, HeadsEstimate
from medusa_plugin.tree.token_tree import TokenTree

HIDDEN, VOCAB, HEADS = 12, 30, 3
CALIBRATION = [HeadCalibration(-0.2, 1.1), HeadCalibration(0.1, 0.9), HeadCalibration()]
Path = tuple[int, ...]


@pytest.fixture
def heads() -> SequentialHeads:
    torch.manual_seed(4)  # of the tests' own inputs
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    target = TargetSpec(
        HIDDEN, VOCAB, embedding, torch.float32, torch.device("cpu"), embedding=embedding
    )
    config = TrainedConfig(
        kind="recurrent",
        num_heads=HEADS,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        width=16,
        output_rank=6,
        draft_vocab_size=9,
    )
    # Ids that are not the columns, so that neither is taken for the other.
    draft_vocab = torch.randperm(VOCAB, generator=generator)[:9]
    made = build_trained(config, target, draft_vocab)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    assert isinstance(made, SequentialHeads)
    return made.requires_grad_(False)


def chances(heads: SequentialHeads, hidden: torch.Tensor, root: int, k: int) -> dict[Path, float]:
    """Probability of every path over the k best candidates of each of its nodes, calibrated."""
    found: dict[Path, float] = {}

    def visit(path: Path, value: float, state: torch.Tensor) -> None:
        depth = len(path)
        if depth == HEADS:
            return
        if depth:
            state = heads.advance(depth, state, torch.tensor(path[-1:]))
        logs = heads.logits(depth, state)[0].log_softmax(0)
        best = logs.topk(k)
        for log, column in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            assert heads.draft_vocab is not None
            calibration = CALIBRATION[depth]
            odds = log - math.log1p(-math.exp(min(log, -1e-6)))
            chance = 1 / (1 + math.exp(-(calibration.bias + calibration.scale * odds)))
            child = (*path, int(heads.draft_vocab[column]))
            found[child] = value * chance
            visit(child, found[child], state)

    visit((), 1.0, heads.begin(hidden[None], torch.tensor([root])))
    return found


def paths_of(ranked: RankedNodes, request: int) -> list[Path]:
    paths: list[Path] = [()]
    for i in range(ranked.tokens.shape[1]):
        if np.isfinite(ranked.log_probs[request, i]):
            parent = int(ranked.parents[request, i])
            paths.append((*paths[parent], int(ranked.tokens[request, i])))
    return paths[1:]


def grown(
    heads: SequentialHeads, hidden: torch.Tensor, roots: torch.Tensor, k: int
) -> tuple[Growth, HeadsEstimate, list[str]]:
    estimate, ids = HeadsEstimate(CALIBRATION), [str(i) for i in range(len(hidden))]
    return Growth(heads, hidden, roots, k, estimate, ids), estimate, ids


@pytest.mark.parametrize(
    ("num_nodes", "k", "batch"), [(1, 1, 1), (8, 3, 1), (30, 4, 3), (63, 9, 4)]
)
def test_the_most_probable_nodes_in_their_order(
    heads: SequentialHeads, num_nodes: int, k: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "MAX_EXPANDED", 100)  # exact
    hidden, roots = torch.randn(batch, HIDDEN), torch.arange(batch)
    tree, _, _ = grown(heads, hidden, roots, k)
    ranked = rank_nodes(tree.widest(num_nodes), (batch, HEADS), num_nodes)
    for request in range(batch):
        known = chances(heads, hidden[request], request, k)
        paths = paths_of(ranked, request)
        assert len(set(paths)) == len(paths) == min(num_nodes, len(known))
        best = sorted(known.values(), reverse=True)[: len(paths)]
        assert [known[path] for path in paths] == pytest.approx(best, rel=1e-4)
        assert np.exp(ranked.log_probs[request, : len(paths)]) == pytest.approx(best, rel=1e-4)


def test_few_expanded_nodes_make_a_tree_of_right_probabilities(
    heads: SequentialHeads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "MAX_EXPANDED", 2)
    hidden, roots = torch.randn(5, HIDDEN), torch.arange(5)
    tree, _, _ = grown(heads, hidden, roots, 9)
    ranked = rank_nodes(tree.widest(25), (5, HEADS), 25)
    for request in range(5):
        known = chances(heads, hidden[request], request, 9)
        paths = paths_of(ranked, request)
        values = np.exp(ranked.log_probs[request, : len(paths)])
        assert [known[path] for path in paths] == pytest.approx(values.tolist(), rel=1e-4)
        assert (np.diff(values) <= 0).all() and len(set(paths)) == len(paths)


def test_a_branch_is_followed_where_its_nodes_are_unlikely(
    heads: SequentialHeads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "MAX_EXPANDED", 1)
    assert heads.draft_vocab is not None
    hidden, roots = torch.randn(4, HIDDEN), torch.arange(4)
    outside = next(token for token in range(VOCAB) if token not in heads.draft_vocab.tolist())
    chain = np.array([[outside, 1, 2, 3, 4], *[[int(heads.draft_vocab[-1]), outside, 7, 8, 9]] * 3])
    probs = np.full(chain.shape, 0.9, np.float32)
    tree, _, _ = grown(heads, hidden, roots, 9)
    ranked = rank_nodes(tree.widest(20), (4, HEADS), 20, Branches(chain, probs))
    for request in range(4):
        paths = paths_of(ranked, request)
        assert len(set(paths)) == len(paths)
        assert tuple(chain[request].tolist()) in paths


def test_the_estimate_learns_from_the_path_that_came(heads: SequentialHeads) -> None:
    hidden, roots = torch.randn(3, HIDDEN), torch.arange(3)
    tree, estimate, ids = grown(heads, hidden, roots, 4)
    ranked = rank_nodes(tree.widest(30), (3, HEADS), 30)
    tree.offer()
    # The first goes down a path of the tree, the second leaves it at once, the third stops short.
    deep = max(paths_of(ranked, 0), key=len)
    short = max(paths_of(ranked, 2), key=len)[:1]
    assert len(deep) == HEADS
    estimate.observe(ids, [deep, (VOCAB + 1, 1, 2), short])
    hits, expected = estimate._heads
    assert hits.tolist() == pytest.approx([2, 1, 1], abs=0.02)  # only the first goes on
    assert expected[0] > expected[2] > 0


def test_a_static_tree_takes_candidates_by_rank(heads: SequentialHeads) -> None:
    topology = TokenTree.from_choices([[0], [1], [0, 0], [1, 2], [0, 0, 1], [2], [1, 2, 0], [0, 3]])
    hidden, roots = torch.randn(3, HIDDEN), torch.arange(3)
    tree, _, _ = grown(heads, hidden, roots, 4)
    ranked = StaticNodes(topology).grow(tree)
    tree.offer()
    for request in range(3):
        known = chances(heads, hidden[request], request, 4)
        by_rank: dict[Path, list[Path]] = {}
        for path in known:
            by_rank.setdefault(path[:-1], []).append(path)  # best first
        paths: list[Path] = [()]
        for row in range(1, topology.num_rows):
            paths.append(by_rank[paths[topology.parents[row]]][topology.ranks[row]])
        assert paths_of(ranked, request) == paths[1:]
        values = [known[path] for path in paths[1:]]
        falling = np.minimum.accumulate(values)
        assert np.exp(ranked.log_probs[request]) == pytest.approx(falling, rel=1e-4)


def test_along_a_text_each_head_reads_the_text_before(heads: SequentialHeads) -> None:
    n = 7
    hidden, text = torch.randn(n, HIDDEN), torch.randint(VOCAB, (n,))
    tokens, log_probs = propose_along(heads, hidden, text, 5)
    for i, head in itertools.product(range(n), range(HEADS)):
        if i + head >= n:
            continue
        state = heads.begin(hidden[i : i + 1], text[i : i + 1])
        for depth in range(1, head + 1):
            state = heads.advance(depth, state, text[i + depth : i + depth + 1])
        best = heads.logits(head, state)[0].log_softmax(0).topk(5)
        assert heads.draft_vocab is not None
        assert tokens[i, head].tolist() == heads.draft_vocab[best.indices].tolist()
        assert log_probs[i, head] == pytest.approx(best.values.numpy(), rel=1e-4, abs=1e-5)


def test_heads_that_overflow_propose_nothing(heads: SequentialHeads) -> None:
    hidden = torch.randn(2, HIDDEN)
    hidden[0] = math.nan
    tree, _, _ = grown(heads, hidden, torch.arange(2), 4)
    ranked = rank_nodes(tree.widest(10), (2, HEADS), 10)
    assert not paths_of(ranked, 0) and len(paths_of(ranked, 1)) == 10
