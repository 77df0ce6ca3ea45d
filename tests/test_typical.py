"""Typical acceptance against the rule as it is written down, in plain Python loops."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from medusa_plugin import typical
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.token_tree import TokenTree
from medusa_plugin.typical import TypicalRule, typical_paths

RULE = TypicalRule(epsilon=0.09, alpha=0.3)
Logits = list[list[float]]


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def threshold(p: Sequence[float], rule: TypicalRule) -> float:
    entropy = -sum(x * math.log(x + 1e-5) for x in p)
    return min(rule.epsilon, rule.alpha * math.exp(-entropy))


def reference(
    tree: DraftTree, logits: Logits, temperature: float, rule: TypicalRule
) -> tuple[tuple[int, ...], float]:
    """The path, found by trying all of them, and how close any decision was."""
    margin = math.inf
    best: tuple[int, float, int] = (0, 0.0, 0)
    path_of_best: tuple[int, ...] = ()
    scores: list[tuple[int, float]] = []
    for end in range(1, tree.num_rows):
        path = [end]
        while parent := int(tree.parents[path[0] - 1]):
            path.insert(0, parent)
        score, accepted = 0.0, True
        for parent, row in zip([0, *path], path, strict=False):
            p = softmax(logits[parent], temperature)
            x = p[int(tree.tokens[row - 1])]
            margin = min(margin, abs(x / threshold(p, rule) - 1))
            accepted = accepted and x > threshold(p, rule)
            score += math.log(x) if x else -math.inf
        if accepted:
            scores.append((len(path), score))
            if (len(path), score, -end) > best or not path_of_best:
                best, path_of_best = (len(path), score, -end), tuple(path)
    for depth, score in scores:
        if depth == best[0] and score != best[1]:
            margin = min(margin, abs(score - best[1]))
    return path_of_best, margin


def random_tree(pick: random.Random, logits: Logits) -> DraftTree:
    """Any shape of at most as many rows as `logits`; children of a row carry distinct tokens.

    They are likely ones or any.
    """
    vocab = len(logits[0])
    parents, ranks, children = [-1], [-1], [0]
    deep = pick.random() < 0.5
    for row in range(1, pick.randint(1, len(logits))):
        parent = pick.randrange(max(0, row - 2), row) if deep else pick.randrange(row)
        if children[parent] == vocab:
            break
        parents.append(parent)
        ranks.append(children[parent])
        children[parent] += 1
        children.append(0)
    offers = [
        sorted(range(vocab), key=lambda t: -row[t])
        if pick.random() < 0.6
        else pick.sample(range(vocab), vocab)
        for row in logits
    ]
    tokens = [offers[parent][rank] for parent, rank in zip(parents[1:], ranks[1:], strict=True)]
    return DraftTree.on(TokenTree(tuple(parents), tuple(ranks)), tokens)


SHAPES: dict[str, Callable[[random.Random, int], list[float]]] = {
    "flat": lambda pick, vocab: [pick.uniform(-0.1, 0.1) for _ in range(vocab)],
    "usual": lambda pick, vocab: [pick.gauss(0, 2) for _ in range(vocab)],
    "peaked": lambda pick, vocab: [12.0 * (i == pick.randrange(vocab)) for i in range(vocab)],
    "few": lambda pick, vocab: [pick.choice([0.0, 5.0 + pick.random()]) for _ in range(vocab)],
    "huge": lambda pick, vocab: [pick.uniform(2e4, 2e4 + 4) for _ in range(vocab)],
    "masked": lambda pick, vocab: [0.5, *(pick.choice([1.0, -math.inf]) for _ in range(vocab - 1))],
}


def case(
    pick: random.Random, vocab: int, shapes: Sequence[str], rule: TypicalRule
) -> tuple[DraftTree, torch.Tensor, float, tuple[int, ...]]:
    """A tree, its logits, a temperature and the path; drawn anew where rounding would decide."""
    while True:
        shape = SHAPES[pick.choice(shapes)]
        rows = [shape(pick, vocab) for _ in range(25)]
        tree = random_tree(pick, rows)
        logits = torch.tensor(rows[: tree.num_rows])
        temperature = pick.choice([0.01, 0.3, 0.7, 1.0, 1.6, 2.0])
        path, margin = reference(tree, logits.tolist(), temperature, rule)
        if margin > 1e-3 or "huge" in shapes:
            return tree, logits, temperature, path


@pytest.mark.parametrize("vocab", [2, 7, 40])
@pytest.mark.parametrize("shape", ["flat", "usual", "peaked", "few", "masked", "all"])
@pytest.mark.parametrize("rule", [RULE, TypicalRule(0.5, 2.0), TypicalRule(0.02, 0.05)], ids=repr)
def test_batched_rule_is_the_written_one(rule: TypicalRule, shape: str, vocab: int) -> None:
    pick = random.Random(f"{rule} {shape} {vocab}")
    shapes = [s for s in SHAPES if s != "huge"] if shape == "all" else [shape]
    cases = [case(pick, vocab, shapes, rule) for _ in range(40)]
    # Rows of other requests lie between: a wrong offset must not go unnoticed.
    rows, first_rows, blocks = 0, [], []
    for _, logits, _, _ in cases:
        gap = pick.randrange(3)
        first_rows.append(rows + gap)
        blocks += [torch.full((gap, vocab), 9.0), logits]
        rows += gap + len(logits)
    logits = torch.cat(blocks)
    before = logits.clone()
    found = typical_paths(
        [tree for tree, *_ in cases], logits, first_rows, [t for _, _, t, _ in cases], rule
    )
    assert found == [path for *_, path in cases]
    assert torch.equal(logits, before)
    if shape == "all":
        assert len({len(path) for path in found}) > 2, "the cases are too much alike"


def test_large_logits_do_not_overflow() -> None:
    """exp(20000) is infinite: only the differences may count."""
    pick = random.Random(0)
    for _ in range(50):
        tree, logits, temperature, _ = case(pick, 12, ["huge"], RULE)
        logits = logits.double().round().float()  # exact in float32, with and without the shift
        shifted = logits - 20000
        found = typical_paths([tree, tree], torch.cat([logits, shifted]), [0, len(logits)],
                              [temperature] * 2, RULE)  # fmt: skip
        assert found[0] == found[1]


@pytest.mark.parametrize("rows_at_once", [1, 3])
def test_parts_of_the_batch_give_what_the_whole_gives(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    pick = random.Random(1)
    cases = [case(pick, 9, ["usual", "flat", "few"], RULE) for _ in range(20)]
    logits = torch.cat([c[1] for c in cases])
    first_rows = [sum(len(c[1]) for c in cases[:i]) for i in range(len(cases))]
    monkeypatch.setattr(typical, "_ROWS_AT_ONCE", rows_at_once)
    found = typical_paths([c[0] for c in cases], logits, first_rows, [c[2] for c in cases], RULE)
    assert found == [c[3] for c in cases]
    assert sum(map(len, found)) > 20


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_logits_are_judged_in_float32(dtype: torch.dtype) -> None:
    # 512 equal tokens: in 16 bits, sums over the vocabulary would be far off.
    logits = torch.zeros(1, 512, dtype=dtype)
    tree = DraftTree.on(TokenTree.chain(1), [5])
    p, entropy = 1 / 512, -math.log(1 / 512 + 1e-5)
    for factor, path in ((0.999, (1,)), (1.001, ())):
        rule = TypicalRule(epsilon=0.5, alpha=factor * p * math.exp(entropy))
        assert typical_paths([tree], logits, [0], [1.0], rule) == [path]


def test_equality_is_not_enough() -> None:
    """p == epsilon exactly: two tokens of one half each."""
    logits = torch.zeros(1, 2)
    tree = DraftTree.on(TokenTree.chain(1), [0])
    assert typical_paths([tree], logits, [0], [1.0], TypicalRule(0.5, 9.0)) == [()]
    assert typical_paths([tree], logits, [0], [1.0], TypicalRule(0.4999, 9.0)) == [(1,)]


def test_entropy_decides_only_where_it_is_high() -> None:
    """Below ln(alpha / epsilon) = 1.204 nats the threshold is epsilon, above it alpha * exp(-H)."""
    tree = DraftTree.on(TokenTree.chain(1), [0])
    wanted = 0.06  # between the two thresholds

    def accepted(others: int) -> bool:
        p = [wanted, *([(1 - wanted) / others] * others)]
        entropy = -sum(x * math.log(x + 1e-5) for x in p)
        assert (entropy > 1.204) == (others > 2)
        return typical_paths([tree], torch.tensor([p]).log(), [0], [1.0], RULE) == [(1,)]

    assert not accepted(others=2)
    assert not accepted(others=3)  # H = 1.26, threshold 0.085
    assert accepted(others=6)  # H = 1.91, threshold 0.044


def test_temperature_sharpens_before_the_rule() -> None:
    tree = DraftTree.on(TokenTree.chain(1), [1])
    logits = torch.tensor([[2.0, 0.0]])  # p(1) = .119 at T = 1, .018 at T = .5
    assert typical_paths([tree], logits, [0], [1.0], RULE) == [(1,)]
    assert typical_paths([tree], logits, [0], [0.5], RULE) == [()]


FORK = TokenTree((-1, 0, 0, 1, 2), (-1, 0, 1, 0, 0))  # rows 1-3 and 2-4


def fork(first: float, second: float, left: float, right: float) -> tuple[int, ...]:
    """The path chosen where rows 1, 2, 3, 4 have these probabilities."""
    rows = [[first, second], [left, 1 - left], [1 - right, right], [1, 1], [1, 1]]
    tree = DraftTree.on(FORK, [0, 1, 0, 1])
    [path] = typical_paths([tree], torch.tensor(rows).log(), [0], [1.0], TypicalRule(0.3, 9.0))
    return path


def test_the_longest_path_wins_and_ties_go_to_the_more_probable() -> None:
    assert fork(0.6, 0.4, 0.9, 0.1) == (1, 3)
    assert fork(0.6, 0.4, 0.1, 0.9) == (2, 4), "longer, though its first token is less probable"
    assert fork(0.6, 0.4, 0.5, 0.9) == (2, 4), ".36 beats .30"
    assert fork(0.6, 0.4, 0.7, 0.9) == (1, 3), ".42 beats .36"
    assert fork(0.5, 0.5, 0.5, 0.5) == (1, 3), "equal: the lower row"
    assert fork(0.6, 0.4, 0.1, 0.1) == (1,)
    assert fork(0.2, 0.8, 0.9, 0.1) == (2,), "an accepted child of a rejected row is out of reach"


def test_placeholders_and_trees_without_nodes() -> None:
    chain = TokenTree.chain(2)
    logits = torch.zeros(9, 2)
    logits[:, 0] = 5.0  # what a placeholder's -1 and a padded 0 would hit
    trees = [
        DraftTree.root_only(),
        DraftTree.on(chain, [-1, -1]),
        DraftTree.root_only(),
        DraftTree.on(chain, [0, 0]),
    ]
    assert typical_paths(trees, logits, [0, 1, 4, 5], [1.0] * 4, RULE) == [(), (), (), (1, 2)]
    assert typical_paths(trees[:1], logits, [0], [1.0], RULE) == [()]
