"""Static trees: what is read is checked, what is grown is optimal."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_plugin.tree.static import (
    GENERIC_ACCURACIES,
    MAX_RANK,
    choose_tree,
    grow_tree,
    path_value,
    tree_from_choices,
)
from medusa_plugin.tree.token_tree import TokenTree, TreeError

PATHS = [[0], [1], [0, 0]]


def expected_accepted(tree: TokenTree, accuracies: list[list[float]]) -> float:
    return sum(path_value(tree.path(row), accuracies) for row in range(1, tree.num_rows))


def every_tree(accuracies: list[list[float]], num_nodes: int) -> list[set[tuple[int, ...]]]:
    """All sets of `num_nodes` paths that hold every parent, over the whole table."""
    paths = [
        path
        for depth in range(1, len(accuracies) + 1)
        for path in itertools.product(*(range(len(row)) for row in accuracies[:depth]))
    ]
    return [
        set(chosen)
        for chosen in itertools.combinations(paths, num_nodes)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    ]


tables = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=3), min_size=1, max_size=2)


@settings(max_examples=40, deadline=None)
@given(tables, st.integers(1, 5))
def test_no_tree_beats_a_grown_one_or_the_prefix_of_its_size(
    accuracies: list[list[float]], num_nodes: int
) -> None:
    # Tables need not fall with the rank: a calibration on little text does not.
    grown = grow_tree(accuracies, num_nodes)
    for size in range(1, grown.num_nodes + 1):  # a scheduler may grant any prefix
        best = max(
            sum(path_value(path, accuracies) for path in paths)
            for paths in every_tree(accuracies, size)
        )
        assert expected_accepted(grown.prefix(size), accuracies) == pytest.approx(best, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(tables, tables, st.integers(1, 6), st.randoms(use_true_random=False))
def test_every_prefix_of_a_given_tree_is_the_best_of_its_subtrees(
    shape: list[list[float]], accuracies: list[list[float]], num_nodes: int, random: Random
) -> None:
    # A tree that others chose, and accuracies of our own that may not even know all its paths.
    choices = [tuple(path) for path in grow_tree(shape, num_nodes).choices]
    random.shuffle(choices)
    tree = tree_from_choices(choices, len(shape), MAX_RANK, accuracies)
    assert {tuple(path) for path in tree.choices} == set(choices)
    for size in range(1, len(choices) + 1):
        best = max(
            sum(path_value(path, accuracies) for path in chosen)
            for chosen in itertools.combinations(choices, size)
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
        )
        assert expected_accepted(tree.prefix(size), accuracies) == pytest.approx(best, abs=1e-12)


def test_three_levels_are_optimal_too() -> None:
    accuracies = [[0.6, 0.3], [0.7, 0.2], [0.8, 0.1]]
    for num_nodes in range(1, 6):
        best = max(
            sum(path_value(path, accuracies) for path in paths)
            for paths in every_tree(accuracies, num_nodes)
        )
        grown = grow_tree(accuracies, num_nodes)
        assert grown.num_nodes == num_nodes
        assert expected_accepted(grown, accuracies) == pytest.approx(best)


def test_every_prefix_of_a_grown_tree_is_the_grown_tree_of_that_size() -> None:
    tree = grow_tree(GENERIC_ACCURACIES, 63)
    for num_nodes in range(1, 64):
        assert tree.prefix(num_nodes) == grow_tree(GENERIC_ACCURACIES, num_nodes)


def test_a_small_table_gives_a_smaller_tree() -> None:
    assert grow_tree([[0.5, 0.2], [0.5]], 15).choices == [[0], [0, 0], [1], [1, 0]]


@pytest.mark.parametrize("num_nodes", [0, 64])
def test_sizes_out_of_range_are_refused(num_nodes: int) -> None:
    with pytest.raises(TreeError, match=f"1 to 63 nodes, got {num_nodes}"):
        grow_tree([[0.5]], num_nodes)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "the tree has no paths"),
        ([(0,), (1, 0)], r"path \[1, 0\] has no parent \[1\]: list that path too"),
        ([(0,), (1,), (0,)], r"path \[0\] is given more than once"),
        ([(1,), (0,), (0,)], r"path \[0\] is given more than once"),
        ([(0,), ()], r"path \[\] is the root"),
        ([(0,), (0, 0), (0, 0, 0)], r"path \[0, 0, 0\] is 3 deep, but there are 2 heads"),
        ([(0,), (-1,)], r"path \[-1\] has a rank outside 0..4"),
        ([(0,), (0, 5)], r"path \[0, 5\] has a rank outside 0..4"),
        ([(i,) for i in range(64)], "the tree has 64 nodes, at most 63 fit"),
    ],
)
@pytest.mark.parametrize("accuracies", [None, [[0.5, 0.2], [0.3]]])
def test_bad_paths_are_named(
    choices: list[tuple[int, ...]], message: str, accuracies: list[list[float]] | None
) -> None:
    with pytest.raises(TreeError, match=message):
        tree_from_choices(choices, 2, 5, accuracies)


def test_rows_are_ordered_by_value_with_accuracies_and_by_depth_without() -> None:
    choices = [(1,), (0, 1), (0, 0), (0,)]
    accuracies = [[0.6, 0.1], [0.5, 0.3]]
    by_value = [[0], [0, 0], [0, 1], [1]]
    assert tree_from_choices(choices, 2, 5, accuracies).choices == by_value
    assert tree_from_choices(choices, 2, 5).choices == [[0], [1], [0, 0], [0, 1]]


def test_paths_beyond_the_accuracies_come_last() -> None:
    tree = tree_from_choices([(7,), (0,), (0, 0)], 2, 10, [[0.6, 0.1]])
    assert tree.choices == [[0], [7], [0, 0]]


def test_choose_tree_prefers_the_given_tree_over_the_size() -> None:
    tree = choose_tree(PATHS, num_heads=4, num_nodes=15, accuracies=None)
    assert tree.choices == PATHS
    with pytest.raises(TreeError, match=f"rank outside 0..{MAX_RANK - 1}"):
        choose_tree([[MAX_RANK]], num_heads=4, num_nodes=15, accuracies=None)


@pytest.mark.parametrize(("num_heads", "num_nodes"), [(1, 10), (2, 15), (5, 63), (9, 63)])
def test_the_generic_tree_fits_the_heads(num_heads: int, num_nodes: int) -> None:
    tree = choose_tree("static", num_heads=num_heads, num_nodes=num_nodes, accuracies=None)
    assert tree.num_nodes == num_nodes
    assert max(tree.depths) <= num_heads
    assert not tree.is_chain


def test_a_calibration_decides_over_the_generic_table() -> None:
    sure = [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    tree = choose_tree("static", num_heads=3, num_nodes=3, accuracies=sure)
    assert tree == TokenTree.chain(3)
