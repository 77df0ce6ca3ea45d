"""Dynamic trees against a search over every path."""

from __future__ import annotations

import math

import numpy as np
import pytest

from medusa_plugin.tree.draft_tree import DraftTree, relations
from medusa_plugin.tree.dynamic import (
    Branches,
    FloatArray,
    Int64Array,
    RankedNodes,
    independent,
)
from medusa_plugin.tree.dynamic import rank_nodes as rank_any_nodes


def rank_nodes(
    tokens: Int64Array, log_probs: FloatArray, num_nodes: int, branches: Branches | None = None
) -> RankedNodes:
    """Of heads that do not look at the path."""
    return rank_any_nodes(independent(tokens, log_probs), tokens.shape[:2], num_nodes, branches)


def candidates(
    rng: np.random.Generator, batch: int, heads: int, k: int, vocab: int = 12
) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.stack(
        [[rng.permutation(vocab)[:k] for _ in range(heads)] for _ in range(batch)]
    ).reshape(batch, heads, k)
    probs = rng.dirichlet(np.full(k + 1, 0.5), size=(batch, heads))[..., :k]
    return tokens, np.log(np.maximum(-np.sort(-probs, axis=-1), 1e-9)).astype(np.float32)


def every_node(
    tokens: np.ndarray, log_probs: np.ndarray, branch: tuple[list[int], list[float]] = ([], [])
) -> dict[tuple[int, ...], float]:
    """Token path -> probability, by the definition: head and branch mixed along the branch."""
    heads, _ = tokens.shape
    chain, chain_probs = branch
    known: dict[tuple[int, ...], float] = {(): 1.0}
    frontier: list[tuple[int, ...]] = [()]
    for depth in range(max(heads, len(chain))):
        reached = []
        for path in frontier:
            children: dict[int, float] = {}
            if depth < heads:
                for token, value in zip(tokens[depth], log_probs[depth], strict=True):
                    children[int(token)] = math.exp(value)
            if depth < len(chain) and list(path) == chain[:depth]:
                weight = chain_probs[depth]
                children = {token: p * (1 - weight) for token, p in children.items()}
                children[chain[depth]] = children.get(chain[depth], 0.0) + weight
            for token, p in children.items():
                known[(*path, token)] = known[path] * p
                reached.append((*path, token))
        frontier = reached
    del known[()]
    return known


def paths_of(ranked: RankedNodes, request: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for parent, token, value in zip(
        ranked.parents[request], ranked.tokens[request], ranked.log_probs[request], strict=True
    ):
        if value > -math.inf:
            assert parent < len(paths), "a node comes before its parent"
            paths.append((*paths[parent], int(token)))
    return paths[1:]


@pytest.mark.parametrize("seed", range(30))
def test_the_most_probable_nodes_in_their_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, heads, k = (int(rng.integers(1, high)) for high in (4, 5, 5))
    num_nodes = int(rng.integers(1, 30))
    tokens, log_probs = candidates(rng, batch, heads, k)
    ranked = rank_nodes(tokens, log_probs, num_nodes)
    for request in range(batch):
        known = every_node(tokens[request], log_probs[request])
        paths = paths_of(ranked, request)
        assert len(set(paths)) == len(paths) == min(num_nodes, len(known))
        best = sorted(known.values(), reverse=True)[: len(paths)]
        found = [known[path] for path in paths]
        # Falling: every prefix is the best tree of its size.
        assert found == pytest.approx(best, rel=1e-4)
        assert np.exp(ranked.log_probs[request][: len(paths)]) == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize("seed", range(40))
def test_a_branch_joins_the_ranking(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    batch, heads, k = int(rng.integers(1, 4)), int(rng.integers(0, 4)), int(rng.integers(1, 5))
    length, num_nodes = int(rng.integers(1, 8)), int(rng.integers(1, 40))
    tokens, log_probs = candidates(rng, batch, heads, k)
    chain = rng.integers(0, 12, (batch, length))
    probs = rng.random((batch, length)).astype(np.float32)
    for request in range(batch):
        end = int(rng.integers(0, length + 1))
        chain[request, end:], probs[request, end:] = -1, 0
        if heads and rng.random() < 0.5:  # agree with a head, at least at first
            chain[request, 0] = tokens[request, 0, 0] if end else -1
    ranked = rank_nodes(tokens, log_probs, num_nodes, Branches(chain, probs))
    for request in range(batch):
        end = int((chain[request] >= 0).sum())
        known = every_node(
            tokens[request],
            log_probs[request],
            (chain[request, :end].tolist(), probs[request, :end].tolist()),
        )
        paths = paths_of(ranked, request)
        assert len(set(paths)) == len(paths), "a token is proposed twice under one parent"
        best = sorted(known.values(), reverse=True)[: len(paths)]
        assert len(paths) == min(num_nodes, len(known))
        assert [known[path] for path in paths] == pytest.approx(best, rel=1e-4, abs=1e-9)


def test_certain_candidates_keep_parents_first() -> None:
    # All paths have probability 1: only the order tells parents from children.
    tokens = np.arange(12).reshape(1, 4, 3)
    ranked = rank_nodes(tokens, np.zeros((1, 4, 3), np.float32), 20)
    assert len(paths_of(ranked, 0)) == 20


def test_requests_do_not_see_each_other() -> None:
    rng = np.random.default_rng(5)
    tokens, log_probs = candidates(rng, 6, 3, 4)
    together = rank_nodes(tokens, log_probs, 17)
    for i in range(6):
        alone = rank_nodes(tokens[i : i + 1], log_probs[i : i + 1], 17)
        assert np.array_equal(alone.tokens[0], together.tokens[i])
        assert np.array_equal(alone.parents[0], together.parents[i])


@pytest.mark.parametrize("seed", range(20))
def test_relations_of_random_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, n = int(rng.integers(1, 5)), int(rng.integers(0, 64))
    parents = np.array(
        [[rng.integers(max(0, row - 3), row) for row in range(1, n + 1)] for _ in range(batch)],
        dtype=np.int64,
    ).reshape(batch, n)
    depths, masks = relations(parents)
    for i in range(batch):
        seen = [1]
        level = [0]
        for row, parent in enumerate(parents[i].tolist(), start=1):
            seen.append(seen[parent] | 1 << row)
            level.append(level[parent] + 1)
        assert depths[i].tolist() == level
        assert masks[i].view(np.uint64).tolist() == seen
        tree = DraftTree(np.zeros(n, np.int64), parents[i], depths[i], masks[i])
        assert tree.is_chain == (parents[i].tolist() == list(range(n)))
