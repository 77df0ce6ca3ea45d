"""TokenTree and DraftTree against definitions spelled out on random trees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.token_tree import MAX_ROWS, TokenTree, TreeError


@st.composite
def trees(draw: st.DrawFn, min_rows: int = 1) -> TokenTree:
    """Any topology: each row hangs under any row before it, siblings ranked as they come."""
    num_rows = draw(st.integers(min_rows, MAX_ROWS))
    parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, num_rows)]
    ranks = [-1] + [parents[1:row].count(parents[row]) for row in range(1, num_rows)]
    return TokenTree(tuple(parents), tuple(ranks))


def ancestors(tree: TokenTree, row: int) -> set[int]:
    seen = set()
    while row >= 0:
        seen.add(row)
        row = tree.parents[row]
    return seen


@given(trees())
def test_a_mask_holds_exactly_the_ancestors_and_the_row(tree: TokenTree) -> None:
    for row, mask in enumerate(tree.ancestor_masks):
        assert {j for j in range(MAX_ROWS) if mask >> j & 1} == ancestors(tree, row)
        assert tree.depths[row] == len(ancestors(tree, row)) - 1


@given(trees())
def test_signed_masks_carry_the_same_64_bits(tree: TokenTree) -> None:
    assert [mask % 2**64 for mask in tree.mask_array.tolist()] == list(tree.ancestor_masks)


def test_row_63_uses_the_sign_bit() -> None:
    tree = TokenTree.chain(63)
    assert tree.mask_array[63] == -1
    star = TokenTree((-1, *([0] * 63)), (-1, *range(63)))
    assert star.mask_array[63] == -(2**63) + 1


@given(trees(), st.data())
def test_every_prefix_is_a_tree_that_keeps_its_rows(tree: TokenTree, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, tree.num_nodes))
    prefix = tree.prefix(count)
    assert prefix.num_nodes == count
    assert prefix.choices == tree.choices[:count]
    assert prefix.ancestor_masks == tree.ancestor_masks[: count + 1]


@given(trees())
def test_children_are_the_rows_that_name_their_parent(tree: TokenTree) -> None:
    for row in range(tree.num_rows):
        expected = tuple(r for r in range(tree.num_rows) if tree.parents[r] == row)
        assert tree.children(row) == expected


@given(trees(min_rows=2), st.randoms())
def test_choices_in_any_order_give_the_tree_back(tree: TokenTree, random: object) -> None:
    assert TokenTree.from_choices(tree.choices) == tree
    shuffled = list(tree.choices)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = TokenTree.from_choices(shuffled)
    assert sorted(again.choices) == sorted(tree.choices)


@given(trees(min_rows=2), st.data())
def test_a_granted_prefix_is_the_subtree_with_its_tokens(
    tree: TokenTree, data: st.DataObject
) -> None:
    draft = DraftTree.on(tree, tuple(range(100, 100 + tree.num_nodes)))
    count = data.draw(st.integers(0, tree.num_nodes))
    granted = draft.granted(draft.tokens[:count])
    assert granted is not None
    assert_same(granted, DraftTree.on(tree.prefix(count), draft.tokens[:count]))
    for row in range(granted.num_rows):
        for child in granted.children(row):
            assert granted.child_with_token(row, granted.tokens[child - 1]) == child
        assert granted.child_with_token(row, 7) is None


def test_tokens_that_were_not_drafted_are_not_granted() -> None:
    draft = DraftTree.on(TokenTree.chain(3), (5, 6, 7))
    assert draft.granted((5, 8)) is None
    assert draft.granted((5, 6, 7, 8)) is None
    assert draft.granted((5, 6, 7)) is draft
    nothing = draft.granted(())
    assert nothing is not None
    assert_same(nothing, DraftTree.root_only())


def assert_same(found: DraftTree, expected: DraftTree) -> None:
    for name in ("tokens", "parents", "depths", "masks"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    assert (found.num_rows, found.num_nodes) == (expected.num_rows, expected.num_nodes)
    assert found.is_chain == expected.is_chain


@pytest.mark.parametrize(
    "parents, chain",
    [
        ((-1,), True),
        ((-1, 0), True),
        ((-1, 0, 1, 2), True),
        ((-1, 0, 0), False),
        ((-1, 0, 1, 1), False),
        ((-1, 0, 0, 2), False),
    ],
)
def test_a_chain_has_each_row_after_the_one_before(parents: tuple[int, ...], chain: bool) -> None:
    tree = TokenTree(parents, (-1, *range(len(parents) - 1)))
    assert tree.is_chain is chain
    assert DraftTree.on(tree, range(len(parents) - 1)).is_chain is chain


@given(trees(min_rows=2), st.data())
def test_paths_and_leaves(tree: TokenTree, data: st.DataObject) -> None:
    draft = DraftTree.on(tree, range(100, 100 + tree.num_nodes))
    for row in range(1, tree.num_rows):
        path = draft.path(row)
        assert [0, *path[:-1]] == [tree.parents[r] for r in path]
        assert path[-1] == row
        assert draft.tokens_of(path) == [99 + r for r in path]
    assert draft.path(0) == draft.tokens_of([]) == []
    rows = data.draw(st.sets(st.integers(1, tree.num_nodes)))
    expected = [row for row in sorted(rows) if not rows & set(tree.children(row))]
    assert draft.leaves(rows) == expected


def test_a_refused_node_keeps_its_place_and_carries_no_token() -> None:
    draft = DraftTree.on(TokenTree.from_choices([[0], [1], [0, 0], [1, 0]]), (4, 5, 9, 8))
    found = draft.granted([-1, 5, 9, 8])
    assert found is not None and found.tokens.tolist() == [-1, 5, 9, 8]
    assert found.parents.tolist() == draft.parents.tolist()
    assert found.child_with_token(0, 4) is None and found.child_with_token(0, 5) == 2
    assert draft.granted([-1, 6]) is None  # another token than was drafted
    assert draft.granted([-1, -1]) is None  # placeholders, for which nothing was drafted
    assert draft.granted([4, 5, 9, 8, 7]) is None


def test_a_token_is_found_under_its_own_parent_only() -> None:
    tree = TokenTree.from_choices([[0], [1], [0, 0], [1, 0]])
    draft = DraftTree.on(tree, (4, 5, 9, 9))
    assert draft.child_with_token(1, 9) == 3
    assert draft.child_with_token(2, 9) == 4
    assert draft.child_with_token(0, 9) is None


@pytest.mark.parametrize(
    ("parents", "ranks", "message"),
    [
        ((-1, 1), (-1, 0), "row 1 has parent 1, expected a row before it"),
        ((-1, 2, 0), (-1, 0, 0), "row 1 has parent 2"),
        ((-1, -1), (-1, 0), "row 1 has parent -1"),
        ((-1, 0, 0), (-1, 3, 3), "row 2 repeats rank 3 under parent 0"),
        ((-1, 0), (-1, -1), "row 1 has rank -1"),
        ((0,), (-1,), "row 0 must be the root"),
        ((-1,), (-1, 0), "1 parents but 2 ranks"),
        ((-1, *range(64)), (-1, *[0] * 64), "got 65"),
        ((), (), "got 0"),
    ],
)
def test_malformed_topologies_are_refused(
    parents: tuple[int, ...], ranks: tuple[int, ...], message: str
) -> None:
    with pytest.raises(TreeError, match=message):
        TokenTree(parents, ranks)


def test_a_draft_needs_one_token_per_node() -> None:
    with pytest.raises(ValueError, match=r"a tree of 2 nodes needs as many tokens.*got 1"):
        DraftTree.on(TokenTree.chain(2), (1,))
