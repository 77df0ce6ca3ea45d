"""DraftTree: a tree topology together with the tokens that one request drafted on it."""

from __future__ import annotations

from dataclasses import dataclass

from medusa_plugin.tree.token_tree import TokenTree

ROOT_ONLY = TokenTree.chain(0)


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens on a topology.

    Raises:
        ValueError: `tokens` does not hold exactly one token per node.
    """

    topology: TokenTree
    tokens: tuple[int, ...]
    """Token of each node in row order, root excluded: row r carries `tokens[r - 1]`."""

    def __post_init__(self) -> None:
        if len(self.tokens) != self.topology.num_nodes:
            raise ValueError(
                f"a tree of {self.topology.num_nodes} nodes needs as many tokens, "
                f"got {len(self.tokens)}"
            )

    @classmethod
    def root_only(cls) -> DraftTree:
        """The tree of a request that drafted nothing."""
        return cls(ROOT_ONLY, ())

    def granted(self, tokens: tuple[int, ...]) -> DraftTree | None:
        """The subtree of the first `len(tokens)` nodes, or None if it does not carry `tokens`.

        A scheduler may grant fewer drafts than proposed; since parents come before children the
        granted prefix is itself a tree.
        """
        if self.tokens[: len(tokens)] != tokens:
            return None
        if len(tokens) == len(self.tokens):
            return self
        return DraftTree(self.topology.prefix(len(tokens)), tokens)

    def child_with_token(self, row: int, token: int) -> int | None:
        """The row of the child of `row` that carries `token`, or None."""
        for child in self.topology.children(row):
            if self.tokens[child - 1] == token:
                return child
        return None
