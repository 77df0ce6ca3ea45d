"""Run the same requests through plain vLLM and through Medusa with a planted draft."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_plugin.embedded import embedded_heads_path
from medusa_plugin.heads import peek_heads
from medusa_plugin.tree.static import choose_tree
from medusa_plugin.tree.token_tree import TokenTree
from tests.engine.drafters import PlantedDrafter

# Shapes whose failures differ: a wrong mask shows in wide trees, a wrong position in deep ones,
# a wrong compaction where the accepted rows are not the first ones.
CHAIN = TokenTree.chain(4)
SINGLE = TokenTree.chain(1)
WIDE = TokenTree.from_choices([(i,) for i in range(10)])
DEEP = TokenTree.from_choices([(1,) * d for d in range(1, 7)] + [(0,), (1, 0), (1, 1, 0)])
BUSHY = TokenTree.from_choices(
    [(a,) for a in range(3)]
    + [(a, b) for a in range(3) for b in range(2)]
    + [(a, b, c) for a in range(2) for b in range(2) for c in range(2)]
)
SHIPPED = choose_tree(
    "static", num_heads=4, num_nodes=15, accuracies=peek_heads(embedded_heads_path()).accuracies
)
TREES = {
    "chain": CHAIN,
    "single": SINGLE,
    "wide": WIDE,
    "deep": DEEP,
    "bushy": BUSHY,
    "shipped": SHIPPED,
}
HIT_RATES = {"oracle": 1.0, "adversarial": 0.0, "mixed": 0.6}
MAX_NODES = max(tree.num_nodes for tree in TREES.values())


@dataclass(frozen=True)
class Answer:
    """What a client can see of one completion."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


def prompts(count: int, lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random prompts; each starts with its own number, so none is a prefix of another."""
    pick = random.Random(seed)
    return [
        [i, *(pick.randrange(vocab_size) for _ in range(pick.choice(lengths) - 1))]
        for i in range(count)
    ]


def answers(engine: Any, requests: Sequence[list[int]], params: Any) -> list[list[Answer]]:
    """Completions of every request, through the engine's own front end."""
    outputs = engine.generate(
        [{"prompt_token_ids": list(request)} for request in requests], params, use_tqdm=False
    )
    return [
        [Answer(tuple(c.token_ids), c.text, c.finish_reason, c.stop_reason) for c in output.outputs]
        for output in outputs
    ]


def texts(engine: Any, requests: Sequence[list[int]], params: Any) -> list[tuple[int, ...]]:
    """Token ids of the first completion of every request."""
    return [completions[0].token_ids for completions in answers(engine, requests, params)]


def random_trees(pick: random.Random, count: int, most_nodes: int = MAX_NODES) -> list[TokenTree]:
    """Trees of all shapes, deep ones and bushy ones."""
    trees = []
    for _ in range(count):
        parents, ranks, children = [-1], [-1], [0]
        deep = pick.random() < 0.5
        for row in range(1, pick.randint(1, most_nodes) + 1):
            parent = pick.randrange(max(0, row - 3), row) if deep else pick.randrange(row)
            parents.append(parent)
            ranks.append(children[parent])
            children[parent] += 1
            children.append(0)
        trees.append(TokenTree(tuple(parents), tuple(ranks)))
    return trees


def speculation(heads: Path, **options: Any) -> dict[str, Any]:
    """`speculative_config` of an engine with these heads, for trees of every shape here."""
    return {
        "method": "medusa",
        "model": str(heads),
        "num_speculative_tokens": MAX_NODES,
        **options,
    }


def runner_of(engine: Any) -> Any:
    """The Medusa model runner inside an in-process engine."""
    return engine.llm_engine.model_executor.driver_worker.worker.model_runner


def plant(
    engine: Any, topologies: Sequence[TokenTree], vocab_size: int, hit_rate: float, seed: int = 0
) -> PlantedDrafter:
    """Put a planted drafter in place of the engine's heads and return it."""
    drafter = PlantedDrafter(topologies, vocab_size, hit_rate, seed)
    runner_of(engine).drafter.drafter = drafter
    return drafter


def teach(drafter: PlantedDrafter, plain: Any, requests: Sequence[list[int]], params: Any) -> None:
    """Let `drafter` learn what plain decoding answers, well past where requests stop."""
    unbounded = params.clone()
    unbounded.n = 1
    unbounded.max_tokens = min(params.max_tokens + 8, 64)
    unbounded.min_tokens = 0
    unbounded.stop, unbounded.stop_token_ids, unbounded.ignore_eos = [], [], True
    for request, known in zip(requests, answers(plain, requests, unbounded), strict=True):
        drafter.learn(request, known[0].token_ids)


def assert_draft_did_its_part(drafter: PlantedDrafter, topology: TokenTree) -> None:
    """The tree path really ran, and the oracle was followed while the adversary was not."""
    assert drafter.accepted, "no draft was ever verified"
    if not topology.is_chain:
        assert drafter.branching_steps > 0
    if drafter.hit_rate == 0.0:
        assert sum(drafter.accepted) == 0
    else:
        assert sum(drafter.accepted) > 0
