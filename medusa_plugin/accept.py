"""Acceptance: walk each request's tree over the tokens that the target draws.

Lossless, unless a path was chosen before by another rule (`typical.py`): such a path is followed
without draws, and only its bonus token is drawn.

Sample-and-follow: at the row reached, the target's token is drawn once from its fully processed
distribution; if a child carries that token the walk goes there, otherwise the token is the bonus
token and the walk ends. Every token emitted is a draw of the target, so the output has the
target's distribution for any tree and any draft, and equals plain decoding token by token where
draws are reproducible (greedy, or a request's own generator). For drafts that are not themselves
sampled no rule accepts more: a fixed set of children is right with exactly the target's
probability of that set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from medusa_plugin.tree.draft_tree import DraftTree


class TargetSampler(Protocol):
    """Draws the target's next token at tree rows; supplied by the host."""

    def follow(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Take note of tokens that were accepted without a draw, before the first one.

        Args:
            tokens: request index -> tokens in path order. They are part of the prefix of the
                rows sampled afterwards.
        """
        ...

    def sample(self, rows: Mapping[int, int]) -> Mapping[int, int | None]:
        """Draw one token for each request of `rows`.

        Args:
            rows: request index -> tree row (0 is the root). Calls for one request come in path
                order, and each row's prefix is the request's committed output plus the tokens
                already followed and drawn for it in this step.

        Returns:
            request index -> token id, for exactly the requests of `rows`; None where the target's
            output at the row is not finite, so that there is nothing to draw from.
        """
        ...


@dataclass(frozen=True)
class AcceptedPath:
    """What one request gained in a step."""

    rows: tuple[int, ...]
    """Accepted tree rows in path order, root excluded."""
    tokens: tuple[int, ...]
    """The accepted rows' tokens and then the bonus token: `len(rows) + 1` tokens, without the
    bonus token where the path `failed`."""

    @property
    def last_row(self) -> int:
        """The row whose hidden state predicts what follows: the last accepted one."""
        return self.rows[-1] if self.rows else 0

    @property
    def failed(self) -> bool:
        """Whether the target's output at the last row was not finite: the request cannot go on."""
        return len(self.tokens) == len(self.rows)


def walk(
    trees: Sequence[DraftTree],
    sampler: TargetSampler,
    chosen: Mapping[int, Sequence[int]] | None = None,
) -> list[AcceptedPath]:
    """Walk all trees level by level; only the rows visited are sampled.

    Args:
        trees: one per request; a request without a draft has a tree of just the root.
        sampler: draws the target's tokens.
        chosen: request index -> rows in path order, root excluded, of a path that is accepted as
            it is. One token is drawn for such a request, the bonus token at the last of its rows.

    Returns:
        The accepted path of each request, in the order of `trees`.
    """
    chosen = chosen or {}
    rows: list[list[int]] = [list(chosen.get(i, ())) for i in range(len(trees))]
    tokens: list[list[int]] = [
        [int(tree.tokens[row - 1]) for row in path] for tree, path in zip(trees, rows, strict=True)
    ]
    if followed := {i: tokens[i] for i in chosen if tokens[i]}:
        sampler.follow(followed)
    frontier = {i: path[-1] if path else 0 for i, path in enumerate(rows)}
    while frontier:
        drawn = sampler.sample(frontier)
        reached: dict[int, int] = {}
        for request, row in frontier.items():
            token = drawn[request]
            if token is None:
                continue
            tokens[request].append(token)
            if request in chosen:
                continue
            child = trees[request].child_with_token(row, token)
            if child is not None:
                rows[request].append(child)
                reached[request] = child
        frontier = reached
    return [AcceptedPath(tuple(r), tuple(t)) for r, t in zip(rows, tokens, strict=True)]
