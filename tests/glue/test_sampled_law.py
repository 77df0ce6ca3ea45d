"""The lossless walk over vLLM's own sampler: joint law of three tokens against enumeration.

The target is a small random model of which every probability is known, so that the expected count
of each outcome comes from multiplication and not from another sampler. Trees differ by the text
before them, as those of heads do; a step that gains fewer than three tokens is followed by others.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from medusa_plugin.accept import walk
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.token_tree import TokenTree
from medusa_plugin.typical import TypicalRule, typical_paths
from medusa_plugin.vllm_glue.sampling import TreeRowSampler

VOCAB = 5
NUM_TOKENS = 3
BATCH = 3000
ROUNDS = 4
RULE = TypicalRule(epsilon=0.09, alpha=0.3)

Text = tuple[int, ...]


@functools.cache
def target_logits(text: Text) -> torch.Tensor:
    """Of the token after `text`; no two texts have the same."""
    pick = random.Random(f"target {text}")
    return torch.tensor([pick.gauss(0, 1.2) for _ in range(VOCAB)])


@dataclass(frozen=True)
class Settings:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def law(self, text: Text) -> list[float]:
        """Probabilities of the next token, worked out token by token."""
        logits = target_logits(text).tolist()
        weights = [math.exp(x / self.temperature) for x in logits]
        weights = [w if w >= self.min_p * max(weights) else 0.0 for w in weights]
        order = sorted(range(VOCAB), key=lambda t: -weights[t])
        kept = order[: self.top_k] if self.top_k else order
        total, before, law = sum(weights[t] for t in kept), 0.0, [0.0] * VOCAB
        for token in kept:
            if before / total < self.top_p:
                law[token] = weights[token]
            before += weights[token]
        return [w / sum(law) for w in law]

    def metadata(self, outputs: list[list[int]]) -> SamplingMetadata:
        n = len(outputs)
        min_p = MinPLogitsProcessor(
            SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=n)),
            torch.device("cpu"),
            False,
        )
        params = SamplingParams(min_p=self.min_p)
        added = [(i, params, [], output) for i, output in enumerate(outputs)]
        min_p.update_state(BatchUpdate(batch_size=n, removed=[], added=added, moved=[]))
        nothing = torch.zeros(n)
        return SamplingMetadata(
            temperature=torch.full((n,), self.temperature),
            all_greedy=False,
            all_random=True,
            top_p=torch.full((n,), self.top_p) if self.top_p < 1 else None,
            top_k=torch.full((n,), self.top_k, dtype=torch.int32) if self.top_k else None,
            generators={},
            max_num_logprobs=None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=nothing,
            presence_penalties=nothing,
            repetition_penalties=nothing,
            output_token_ids=outputs,
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors([min_p]),
        )


@dataclass(frozen=True)
class Shape:
    topology: TokenTree
    same_in_every_branch: bool = False
    """All rows offer the same tokens: one token then stands at many places of the tree."""

    def draft(self, text: Text) -> tuple[DraftTree, torch.Tensor]:
        """The tree after `text` and the target's logits of its rows."""
        return _draft(self, text)


@functools.cache
def _draft(shape: Shape, text: Text) -> tuple[DraftTree, torch.Tensor]:
    topology, paths = shape.topology, [text]
    for row in range(1, topology.num_rows):
        parent = topology.parents[row]
        where = text if shape.same_in_every_branch else (text, parent)
        offer = random.Random(f"draft {where}").sample(range(VOCAB), VOCAB)
        paths.append((*paths[parent], offer[topology.ranks[row]]))
    tree = DraftTree.on(topology, [path[-1] for path in paths[1:]])
    return tree, torch.stack([target_logits(path) for path in paths])


BUSHY = TokenTree.from_choices(
    [(a,) for a in range(3)]
    + [(a, b) for a in range(3) for b in range(2)]
    + [(a, b, c) for a in range(2) for b in range(2) for c in range(2)]
)
SHAPES = {
    "none": Shape(TokenTree.chain(0)),
    "chain": Shape(TokenTree.chain(3)),
    "wide": Shape(TokenTree.from_choices([(a,) for a in range(4)])),
    "every-token": Shape(TokenTree.from_choices([(a,) for a in range(VOCAB)])),
    "deep": Shape(
        TokenTree.from_choices([(1,) * d for d in range(1, 5)] + [(0,), (1, 0), (1, 1, 0)])
    ),
    "bushy": Shape(BUSHY),
    "duplicates": Shape(BUSHY, same_in_every_branch=True),
}
SETTINGS = {
    "plain": Settings(),
    "cold": Settings(temperature=0.4),
    "hot": Settings(temperature=1.9),
    "top-k": Settings(top_k=3),
    "top-p": Settings(top_p=0.75),
    "min-p": Settings(min_p=0.2),
    "all": Settings(temperature=1.3, top_k=4, top_p=0.9, min_p=0.1),
}


def three_tokens(
    shape: Shape, settings: Settings, typical: range = range(0)
) -> tuple[list[Text], int]:
    """Texts of a batch that decodes step by step, and how many drafted tokens were accepted.

    The requests `typical` have their paths chosen by the typical rule.
    """
    texts: list[Text] = [()] * BATCH
    accepted = 0
    while min(map(len, texts)) < NUM_TOKENS:
        drafts = [shape.draft(text) for text in texts]
        trees = [tree for tree, _ in drafts]
        logits = torch.cat([rows for _, rows in drafts])
        first_rows = [0, *itertools.accumulate(tree.num_rows for tree in trees[:-1])]
        outputs = [list(text) for text in texts]
        sampler = TreeRowSampler(
            Sampler(), logits, first_rows, settings.metadata(outputs), outputs, frozenset()
        )
        judged = typical_paths(
            [trees[i] for i in typical],
            logits,
            [first_rows[i] for i in typical],
            [settings.temperature] * len(typical),
            RULE,
        )
        paths = walk(trees, sampler, dict(zip(typical, judged, strict=True)))
        sampler.finish()
        assert outputs == [list(text) for text in texts]
        accepted += sum(len(path.rows) for path in paths)
        texts = [(*text, *path.tokens) for text, path in zip(texts, paths, strict=True)]
    return [text[:NUM_TOKENS] for text in texts], accepted


def p_value(texts: list[Text], settings: Settings) -> float:
    """Of the chi-square test; outcomes expected less than 5 times are taken together."""
    counts = Counter(texts)
    observed, expected, rare = [], [], [0.0, 0.0]
    for text in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        law = math.prod(settings.law(text[:i])[text[i]] for i in range(NUM_TOKENS))
        if not law:
            assert not counts[text], f"{text} cannot be drawn"
        elif law * len(texts) < 5:
            rare[0], rare[1] = rare[0] + counts[text], rare[1] + law * len(texts)
        else:
            observed.append(counts[text])
            expected.append(law * len(texts))
    if rare[1]:
        observed.append(rare[0])
        expected.append(rare[1])
    assert len(observed) > 5
    return float(stats.chisquare(observed, expected).pvalue)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_lossless(shape: str, settings: str) -> None:
    torch.manual_seed(1)
    texts, accepted = [], 0
    for _ in range(ROUNDS):
        more, gained = three_tokens(SHAPES[shape], SETTINGS[settings])
        texts += more
        accepted += gained
    assert (accepted > BATCH / 2) == (shape != "none"), "the trees were not followed"
    assert p_value(texts, SETTINGS[settings]) > 1e-3


def test_the_typical_rule_would_be_noticed() -> None:
    """It is lossy: a test that does not tell it from the law could not tell a wrong walk either."""
    torch.manual_seed(1)
    texts, _ = three_tokens(SHAPES["bushy"], Settings(), typical=range(BATCH))
    assert p_value(texts, Settings()) < 1e-12


def test_lossless_requests_beside_typical_ones() -> None:
    torch.manual_seed(2)
    typical = range(0, BATCH, 2)
    lossless_texts: list[Text] = []
    for _ in range(2 * ROUNDS):
        texts, _ = three_tokens(SHAPES["bushy"], Settings(), typical)
        lossless_texts += [text for i, text in enumerate(texts) if i not in typical]
    assert p_value(lossless_texts, Settings()) > 1e-3


def test_the_bonus_token_of_a_typical_path_is_drawn_at_its_end() -> None:
    """By the request's own parameters, from the row that the path ends in."""
    torch.manual_seed(3)
    tree, logits = SHAPES["bushy"].draft(())
    [path] = typical_paths([tree], logits, [0], [1.0], RULE)
    assert len(path) > 1
    tokens = tuple(int(tree.tokens[row - 1]) for row in path)
    settings = Settings(top_k=3)
    outputs: list[list[int]] = [[] for _ in range(BATCH)]
    sampler = TreeRowSampler(
        Sampler(),
        logits.repeat(BATCH, 1),
        range(0, BATCH * tree.num_rows, tree.num_rows),
        settings.metadata(outputs),
        outputs,
        frozenset(),
    )
    paths = walk([tree] * BATCH, sampler, dict.fromkeys(range(BATCH), path))
    assert {found.rows for found in paths} == {path}
    assert {found.tokens[:-1] for found in paths} == {tokens}
    assert {tuple(output[:-1]) for output in outputs} == {tokens}, "the bonus must see the path"
    law = settings.law(tokens)
    counts = Counter(found.tokens[-1] for found in paths)
    drawn = [token for token in range(VOCAB) if law[token]]
    assert set(counts) == set(drawn)
    expected = [BATCH * law[token] for token in drawn]
    assert stats.chisquare([counts[token] for token in drawn], expected).pvalue > 1e-3


class Watcher(LogitsProcessor):
    """Notes what a processor that watches an output could know when a token is drawn."""

    def __init__(self, output: list[int]) -> None:
        self.output = output
        self.known: list[int] = []
        self.seen: list[list[int]] = []

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.known = list(self.output)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.known)
        return logits


def test_processors_see_a_followed_path_before_the_bonus_token_is_drawn() -> None:
    """Minimum lengths and bad words are decided by it."""
    tree, logits = SHAPES["chain"].draft(())
    output = [4, 4]
    watcher = Watcher(output)
    watcher.update_state(None)  # as vLLM does before a step
    metadata = replace(Settings().metadata([output]), logitsprocs=LogitsProcessors([watcher]))
    sampler = TreeRowSampler(Sampler(), logits, [0], metadata, [output], frozenset())
    [path] = walk([tree], sampler, {0: (1, 2)})
    assert watcher.seen == [[4, 4, *tree.tokens[:2].tolist()]]
    assert output == [*watcher.seen[0], path.tokens[-1]]
    sampler.finish()
    assert output == [4, 4]


@pytest.mark.parametrize("greedy", [True, False])
def test_masks_that_allow_nothing_are_told_from_numbers_that_are_none(greedy: bool) -> None:
    """A token is drawn as plain vLLM does, where a mask left none; from NaN none is."""
    outputs: list[list[int]] = [[] for _ in range(5)]
    logits = torch.stack([torch.full((VOCAB,), -math.inf) for _ in outputs])
    logits[1, 2], logits[2, 3], logits[3, 2] = 1.0, math.nan, math.inf
    metadata = Settings().metadata(outputs)
    if greedy:
        metadata = replace(
            metadata, all_greedy=True, all_random=False, logitsprocs=LogitsProcessors([])
        )
    discarded, tree = frozenset([4]), DraftTree.on(TokenTree.chain(0), [])
    sampler = TreeRowSampler(Sampler(), logits, range(5), metadata, outputs, discarded)
    paths = walk([tree] * 5, sampler)
    assert [path.failed for path in paths] == [False, False, True, True, False]
    assert paths[1].tokens == (2,)
    assert sampler.unanswerable == {0}
