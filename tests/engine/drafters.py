"""Drafters that know, or deliberately miss, the target's own future.

Random heads accept nothing, so they test only rejection. These plant the future that plain
decoding produced: *oracle* always, *adversarial* never, *mixed* now and then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.batch import StepRequest
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.token_tree import TokenTree
from medusa_plugin.typical import TypicalRule
from tests.test_typical import reference

Prefix = tuple[int, ...]


class PlantedDrafter:
    """Plants known continuations on a path of a tree; all other nodes carry wrong tokens.

    Args:
        topologies: one is picked at random for each draft.
        vocab_size: tokens are below it.
        hit_rate: probability that a level of the path carries the right token; 1 is the oracle,
            0 the adversary.
        seed: of the picks.
    """

    def __init__(
        self,
        topologies: Sequence[TokenTree],
        vocab_size: int,
        hit_rate: float,
        seed: int = 0,
    ) -> None:
        self.topologies = topologies
        self.vocab_size = vocab_size
        self.hit_rate = hit_rate
        self.alphabet: Sequence[int] = range(vocab_size)
        """Wrong tokens are drawn from here."""
        self.futures: dict[Prefix, list[int]] = {}
        self.accepted: list[int] = []
        """Accepted nodes of every draft that followed a verified one, for the tests to check."""
        self.branching_steps = 0
        self.on_draft: Callable[[Sequence[StepRequest]], None] | None = None
        self._random = random.Random(seed)

    def learn(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Remember that plain decoding continues `prompt` by `output`."""
        self.futures[tuple(prompt)] = list(output)

    def draft(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> list[DraftTree]:
        """See `medusa_plugin.draft.Drafter`."""
        assert hidden_states.shape[0] == len(requests)
        if self.on_draft is not None:
            self.on_draft(requests)
        drafts = []
        for request, path in zip(requests, paths, strict=True):
            if request.tree.num_nodes:
                self.accepted.append(len(path.rows))
                self.branching_steps += not request.tree.is_chain
            sequence = (*request.committed.tolist(), *path.tokens)
            topology = self._random.choice(self.topologies)
            tree = DraftTree.on(topology, self._tokens(topology, self._future(sequence)))
            drafts.append(tree.prefix(request.options.node_limit(tree.num_nodes)))
        return drafts

    def forget(self, request_ids: Iterable[str]) -> None:
        """See `medusa_plugin.draft.Drafter`; nothing is kept by request."""

    def observe_step(
        self, num_rows: int, num_requests: int, num_tokens: int, seconds: float
    ) -> None:
        """See `medusa_plugin.draft.Drafter`; costs do not matter."""

    def _future(self, sequence: Prefix) -> list[int]:
        for prompt, output in self.futures.items():
            known = (*prompt, *output)
            if len(sequence) > len(prompt) and known[: len(sequence)] == sequence:
                return list(known[len(sequence) :])
        return []

    def _tokens(self, topology: TokenTree, future: list[int]) -> tuple[int, ...]:
        tokens = [0] * topology.num_rows
        on_path = {0}
        for row in range(topology.num_rows):
            children = topology.children(row)
            if not children:
                continue
            depth = topology.depths[row]
            right = future[depth] if row in on_path and depth < len(future) else None
            chosen = self._wrong_tokens(len(children), right)
            if right is not None and self._random.random() < self.hit_rate:
                lucky = self._random.randrange(len(children))
                chosen[lucky] = right
                on_path.add(children[lucky])
            for child, token in zip(children, chosen, strict=True):
                tokens[child] = token
        return tuple(tokens[1:])

    def _wrong_tokens(self, count: int, right: int | None) -> list[int]:
        """Distinct tokens other than `right`; topped up from outside a small alphabet."""
        pool = [t for t in self.alphabet if t != right]
        if len(pool) < count:
            pool += [t for t in range(self.vocab_size) if t not in self.alphabet][:count]
        return self._random.sample(pool, count)


class LikelyDrafter:
    """Drafts what a copy of the target finds rather likely, and judges typical paths by it."""

    def __init__(self, model: Path, topology: TokenTree, rule: TypicalRule) -> None:
        from transformers import LlamaForCausalLM

        self.target = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.topology, self.rule = topology, rule
        self.accepted: list[int] = []
        """Of every verified tree."""
        self.judged, self.close, self.placeholders = 0, 0, 0
        self.temperatures: set[float] = set()
        """By which the typical rule judged."""

    def draft(
        self,
        requests: Sequence[StepRequest],
        paths: Sequence[AcceptedPath],
        hidden_states: torch.Tensor,
    ) -> list[DraftTree]:
        for request, path in zip(requests, paths, strict=True):
            self._check(request, path)
        return [
            self._tree([*request.committed.tolist(), *path.tokens], request)
            for request, path in zip(requests, paths, strict=True)
        ]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nothing is kept by request."""

    def observe_step(
        self, num_rows: int, num_requests: int, num_tokens: int, seconds: float
    ) -> None:
        """Sizes do not follow the cost."""

    def _check(self, request: StepRequest, path: AcceptedPath) -> None:
        tree = request.tree
        if not tree.num_nodes:
            return
        if (tree.tokens < 0).any():
            self.placeholders += 1
            assert path.rows == ()
            return
        self.accepted.append(len(path.rows))
        if request.typical_temperature is None:
            return
        self.temperatures.add(request.typical_temperature)
        texts = [request.committed.tolist()]
        for row in range(1, tree.num_rows):
            texts.append([*texts[tree.parents[row - 1]], int(tree.tokens[row - 1])])
        logits = [self._logits(text).tolist() for text in texts]
        expected, margin = reference(tree, logits, request.typical_temperature, self.rule)
        if margin < 1e-3:  # rounding decides
            self.close += 1
            return
        assert path.rows == expected
        self.judged += 1

    def _tree(self, text: list[int], request: StepRequest) -> DraftTree:
        topology = self.topology
        texts = [text]
        for row in range(1, topology.num_rows):
            before = texts[topology.parents[row]]
            # Not always the best, but always the same after a text.
            skipped = random.Random(str(before)).choice([0, 0, 0, 1, 2, 60, 150])
            likely = self._logits(before).argsort(descending=True)
            texts.append([*before, int(likely[topology.ranks[row] + skipped])])
        tree = DraftTree.on(topology, [text[-1] for text in texts[1:]])
        return tree.prefix(request.options.node_limit(tree.num_nodes))

    @torch.inference_mode()
    def _logits(self, text: list[int]) -> torch.Tensor:
        return self.target(torch.tensor([text])).logits[0, -1]
