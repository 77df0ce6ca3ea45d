"""A node's logits depend on its path alone, however many nodes are verified with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.batch import StepRequest
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.token_tree import TokenTree
from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE

NUM_NODES = 63  # with the root 64 rows


class PrefixDrafter:
    """Drafts the first `num_nodes` of one tree, whatever the request."""

    def __init__(self, num_nodes: int) -> None:
        tree = TokenTree.from_choices(
            [path for depth in range(1, 6) for path in _paths(depth)] + [(1, 1, 2)]
        )
        assert tree.num_nodes == NUM_NODES
        tokens = [(7 * row + 3) % VOCAB_SIZE for row in range(1, tree.num_rows)]
        self.tree = DraftTree.on(tree, tokens).prefix(num_nodes)

    def draft(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> list[DraftTree]:
        return [self.tree] * len(requests)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nothing is kept by request."""

    def observe_step(self, *args: Any) -> None:
        """Costs do not matter."""


def _paths(depth: int) -> list[tuple[int, ...]]:
    """All binary paths of a length."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        paths = [(*path, rank) for path in paths for rank in (0, 1)]
    return paths


def first_tree_logits(medusa: Any, prompt: list[int], num_nodes: int) -> torch.Tensor:
    """`[1 + num_nodes, vocab]` target logits of the first verified tree."""
    runner = harness.runner_of(medusa)
    runner.drafter.drafter = PrefixDrafter(num_nodes)
    seen = watch_logits(runner)
    harness.texts(medusa, [prompt], SamplingParams(temperature=0, max_tokens=70, ignore_eos=True))
    return next(logits for logits in seen if len(logits) == 1 + num_nodes)


def watch_logits(runner: Any) -> list[torch.Tensor]:
    """A list that grows by the logits of every step from now on."""
    original = type(runner)._sample
    seen: list[torch.Tensor] = []

    def sample(logits: torch.Tensor, metadata: Any) -> Any:
        seen.append(logits.clone())
        return original(runner, logits, metadata)

    runner._sample = sample
    return seen


def test_logits_of_a_node_in_trees_of_any_size(make_engine: Any, random_heads: Path) -> None:
    medusa = make_engine(
        speculative_config=harness.speculation(
            random_heads, num_speculative_tokens=NUM_NODES, sizes="fixed"
        ),
    )
    [prompt] = harness.prompts(1, lengths=[50], vocab_size=VOCAB_SIZE, seed=31)
    full = first_tree_logits(medusa, prompt, NUM_NODES)
    for num_nodes in (7, 20):
        part = first_tree_logits(medusa, prompt, num_nodes)
        torch.testing.assert_close(part, full[: 1 + num_nodes], atol=1e-5, rtol=0)
    # A chain takes vLLM's kernel, which sums in another order: 2e-6 of the largest logit was seen.
    other_kernel = 5e-6 * float(full.abs().max())
    chain = first_tree_logits(medusa, prompt, 1)
    torch.testing.assert_close(chain, full[:2], atol=other_kernel, rtol=0)
    # Each row is what plain vLLM computes of the path as ordinary text.
    tree = PrefixDrafter(NUM_NODES).tree
    [first] = harness.texts(medusa, [prompt], SamplingParams(temperature=0, max_tokens=1))
    paths = [[*prompt, *first]]
    for row in range(1, tree.num_rows):
        paths.append([*paths[tree.parents[row - 1]], int(tree.tokens[row - 1])])
    plain = make_engine()
    runner = harness.runner_of(plain)
    seen = watch_logits(runner)
    for row in (0, 1, 2, 7, 20, 40, NUM_NODES):
        harness.texts(plain, [paths[row]], SamplingParams(temperature=0, max_tokens=1))
        torch.testing.assert_close(seen[-1][0], full[row], atol=other_kernel, rtol=0)
