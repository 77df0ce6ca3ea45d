"""The walk: which rows it asks the target about, and what it makes of the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from medusa_plugin.accept import AcceptedPath, walk
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.token_tree import TokenTree


class Script:
    """A target that says, for each request, the tokens of its script one after the other."""

    def __init__(self, *tokens: Sequence[int]) -> None:
        self.tokens = [list(script) for script in tokens]
        self.asked: list[dict[int, int]] = []
        self.followed: list[dict[int, list[int]]] = []

    def follow(self, tokens: Mapping[int, Sequence[int]]) -> None:
        assert not self.asked, "a path is followed before the first draw"
        self.followed.append({request: list(path) for request, path in tokens.items()})

    def sample(self, rows: Mapping[int, int]) -> dict[int, int]:
        self.asked.append(dict(rows))
        return {request: self.tokens[request].pop(0) for request in rows}


# Rows 1 and 2 under the root, 3 and 4 under row 2, 5 under row 4; token 10 + row.
TREE = DraftTree.on(TokenTree((-1, 0, 0, 2, 2, 4), (-1, 0, 1, 0, 1, 0)), [11, 12, 13, 14, 15])


def test_drawn_tokens_are_followed_to_the_first_that_no_child_carries() -> None:
    target = Script([12, 14, 99], [11, 13], [99], [12, 14, 15, 7])
    found = walk([TREE] * 4, target)
    assert found == [
        AcceptedPath((2, 4), (12, 14, 99)),
        AcceptedPath((1,), (11, 13)),
        AcceptedPath((), (99,)),
        AcceptedPath((2, 4, 5), (12, 14, 15, 7)),
    ]
    assert [path.last_row for path in found] == [4, 1, 0, 5]
    # One call per level, and only rows that were reached.
    assert target.asked == [{0: 0, 1: 0, 2: 0, 3: 0}, {0: 2, 1: 1, 3: 2}, {0: 4, 3: 4}, {3: 5}]
    assert target.followed == []


def test_a_chosen_path_ends_with_one_drawn_token() -> None:
    """Even where a child carries that token: it was judged already, and not accepted."""
    target = Script([15], [12], [12, 13, 8], [7], [3])
    trees = [TREE, TREE, TREE, TREE, DraftTree.root_only()]
    found = walk(trees, target, {0: (2, 4), 1: (), 3: (2, 4, 5), 4: ()})
    assert found == [
        AcceptedPath((2, 4), (12, 14, 15)),
        AcceptedPath((), (12,)),
        AcceptedPath((2, 3), (12, 13, 8)),
        AcceptedPath((2, 4, 5), (12, 14, 15, 7)),
        AcceptedPath((), (3,)),
    ]
    assert target.followed == [{0: [12, 14], 3: [12, 14, 15]}]
    assert target.asked == [{0: 4, 1: 0, 2: 0, 3: 5, 4: 0}, {2: 2}, {2: 3}]
