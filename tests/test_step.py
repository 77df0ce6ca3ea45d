"""A step's result when pickled: what one rank tells another."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.step import StepResult
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.token_tree import MAX_ROWS, TokenTree


def random_tree(rng: np.random.Generator, num_nodes: int) -> DraftTree:
    parents = [-1, *(int(rng.integers(max(0, row - 3), row)) for row in range(1, num_nodes + 1))]
    topology = TokenTree(tuple(parents), (-1, *range(num_nodes)))
    return DraftTree.on(topology, rng.integers(0, 1 << 20, num_nodes))


def same(a: DraftTree | None, b: DraftTree | None) -> bool:
    if a is None or b is None:
        return a is b
    names = ("tokens", "parents", "depths", "masks")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


@pytest.mark.parametrize("seed", range(20))
def test_a_result_survives_pickling(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 2, 7, 15, MAX_ROWS - 1, -1], int(rng.integers(1, 6))).tolist()
    drafts = [None if n < 0 else random_tree(rng, n) for n in sizes]
    paths = [AcceptedPath((1, 3), (5, 7, 9)), AcceptedPath((), (2,))] * len(drafts)
    result = StepResult(paths[: len(drafts)], drafts, {0: [2, 5]})
    found = pickle.loads(pickle.dumps(result))
    assert found.paths == result.paths
    assert found.damaged == result.damaged
    assert all(same(a, b) for a, b in zip(found.drafts, drafts, strict=True))
    # Where nothing is drafted is not where just the root is.
    assert [draft is None for draft in found.drafts] == [n < 0 for n in sizes]
