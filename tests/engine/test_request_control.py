"""What a request may ask: no drafts, smaller trees, typical acceptance; and what is refused."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.batch import StepRequest
from medusa_plugin.request_options import RequestOptionsError
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.token_tree import TokenTree
from medusa_plugin.typical import TypicalRule
from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE
from tests.test_typical import reference

TYPICAL = {"medusa": {"acceptance": "typical"}}


class LikelyDrafter:
    """Drafts what a copy of the target finds rather likely, and judges typical paths by it."""

    def __init__(self, model: Path, topology: TokenTree, rule: TypicalRule) -> None:
        from transformers import LlamaForCausalLM

        self.target = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.topology, self.rule = topology, rule
        self.accepted: list[int] = []
        """Of every verified tree."""
        self.judged, self.close, self.placeholders = 0, 0, 0

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

    def observe_step(self, num_rows: int, num_requests: int, seconds: float) -> None:
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
        topology = TokenTree.chain(3) if request.chain_only else self.topology
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


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine()


@pytest.fixture(scope="module")
def medusa(make_engine: Any, random_heads: Path) -> Any:
    return make_engine(
        speculative_config={
            "method": "medusa",
            "model": str(random_heads),
            "num_speculative_tokens": harness.MAX_NODES,
        },
        additional_config={"medusa": {"sizes": "fixed"}},
    )


SMALL = TokenTree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


@pytest.fixture
def likely(medusa: Any, tiny_model: Path) -> LikelyDrafter:
    drafter = LikelyDrafter(tiny_model, SMALL, TypicalRule(0.09, 0.3))
    harness.runner_of(medusa).drafter.drafter = drafter
    return drafter


@pytest.fixture
def real_drafter(medusa: Any) -> Any:
    """The engine's own heads, back in place of a planted drafter."""
    runner = harness.runner_of(medusa)
    runner.drafter.load_model(runner.model)
    return runner.medusa_drafter


def params(options: Any = None, **others: Any) -> SamplingParams:
    extra_args = None if options is None else {"medusa": options}
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 32, "ignore_eos": True, **others}, extra_args=extra_args
    )


def texts(engine: Any, requests: Sequence[list[int]], asked: Any) -> list[tuple[int, ...]]:
    return [answers[0].token_ids for answers in harness.answers(engine, requests, asked)]


# No drafts, smaller trees


def test_a_request_that_wants_no_drafts_gets_none(plain: Any, medusa: Any) -> None:
    requests = harness.prompts(6, lengths=[2, 9, 33, 70], vocab_size=VOCAB_SIZE)
    drafter = harness.plant(medusa, [harness.BUSHY], VOCAB_SIZE, 1.0)
    harness.teach(drafter, plain, requests, params())
    verified: dict[bool, int] = {True: 0, False: 0}

    def note(step: Sequence[StepRequest]) -> None:
        for request in step:
            verified[request.options.enabled] += request.tree.num_nodes

    drafter.on_draft = note
    asked = [params({"enabled": i % 2 == 0}) for i in range(6)]
    assert texts(medusa, requests, asked) == texts(plain, requests, params())
    assert verified[False] == 0
    assert verified[True] > 0 and sum(drafter.accepted) > 0


def test_heads_are_not_evaluated_where_nobody_wants_drafts(
    plain: Any, medusa: Any, real_drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = harness.prompts(3, lengths=[9, 33], vocab_size=VOCAB_SIZE)
    monkeypatch.setattr(real_drafter.heads, "propose", None)
    asked = params('{"enabled": false}')  # as the server hands it on
    assert texts(medusa, requests, asked) == texts(plain, requests, params())


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_max_nodes_is_a_ceiling(
    plain: Any, medusa: Any, real_drafter: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "static":
        real_drafter.__init__(real_drafter.heads, num_nodes=15, tree=harness.SHIPPED)
    most = real_drafter.num_nodes
    proposed: dict[int | None, set[int]] = {}
    draft = real_drafter.draft

    def watched(requests: Sequence[StepRequest], *rest: Any) -> list[DraftTree]:
        trees: list[DraftTree] = draft(requests, *rest)
        for request, tree in zip(requests, trees, strict=True):
            proposed.setdefault(request.options.max_nodes, set()).add(tree.num_nodes)
        return trees

    monkeypatch.setattr(real_drafter, "draft", watched)
    limits = [None, 1, 3, 63]
    requests = harness.prompts(4, lengths=[9, 33], vocab_size=VOCAB_SIZE)
    asked = [params({"max_nodes": limit}) for limit in limits]
    assert texts(medusa, requests, asked) == texts(plain, requests, params())
    assert proposed == {None: {most}, 1: {1}, 3: {3}, 63: {most}}


# Typical acceptance


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_typical_paths_are_those_of_the_rule(
    medusa: Any, likely: LikelyDrafter, temperature: float
) -> None:
    """Every path of an engine's run, recomputed from a copy of the target by the written rule."""
    requests = harness.prompts(4, lengths=[2, 9, 33, 70], vocab_size=VOCAB_SIZE, seed=1)
    accepted = harness.runner_of(medusa).accepted_tokens
    before = accepted.typical, accepted.lossless
    asked = params(TYPICAL["medusa"], temperature=temperature, seed=1)
    assert [len(text) for text in texts(medusa, requests, asked)] == [32] * 4
    assert likely.judged > 20 * likely.close
    assert likely.judged > 20
    assert len(set(likely.accepted)) > 2
    assert (accepted.typical, accepted.lossless) == (before[0] + sum(likely.accepted), before[1])


def test_typical_accepts_more_than_lossless(medusa: Any, likely: LikelyDrafter) -> None:
    requests = harness.prompts(6, lengths=[2, 9, 33], vocab_size=VOCAB_SIZE, seed=2)
    rates = {}
    for acceptance in ("lossless", "typical"):
        likely.accepted.clear()
        texts(medusa, requests, params({"acceptance": acceptance}, temperature=1.0, seed=3))
        rates[acceptance] = sum(likely.accepted) / len(likely.accepted)
    assert rates["typical"] > 1.2 * rates["lossless"] > 0


def test_typical_at_temperature_zero_is_greedy(
    plain: Any, medusa: Any, likely: LikelyDrafter
) -> None:
    requests = harness.prompts(6, lengths=[2, 9, 33], vocab_size=VOCAB_SIZE, seed=3)
    counted = harness.runner_of(medusa).accepted_tokens.typical
    # Nothing is lossy here, so nothing is refused either.
    for others in ({}, {"logprobs": 1, "repetition_penalty": 1.3}):
        expected = texts(plain, requests, params(**others))
        assert texts(medusa, requests, params(TYPICAL["medusa"], **others)) == expected
    assert sum(likely.accepted) > 0
    assert likely.judged == 0
    assert harness.runner_of(medusa).accepted_tokens.typical == counted


LOSSLESS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_k": 7, "top_p": 0.9},
    {"temperature": 1.0, "seed": 7, "min_p": 0.05, "logprobs": 2},
    {"temperature": 0.7, "seed": 8, "repetition_penalty": 1.4, "min_tokens": 9},
    {"logprobs": 1},
    {"temperature": 1.2, "seed": 9, "logit_bias": {5: 3.0}},
    {"structured_outputs": StructuredOutputsParams(regex="[a-c]{30}")},
]


def test_lossless_requests_beside_typical_ones_equal_plain(
    plain: Any, medusa: Any, likely: LikelyDrafter
) -> None:
    count = len(LOSSLESS)
    requests = harness.prompts(2 * count, lengths=[2, 9, 33, 70], vocab_size=VOCAB_SIZE, seed=4)
    typical = params(TYPICAL["medusa"], temperature=1.5)
    asked = [p for others in LOSSLESS for p in (params(**others), typical)]
    batch = [{"prompt_token_ids": request} for request in requests]
    found = medusa.generate(batch, asked, use_tqdm=False)[::2]
    expected = plain.generate(batch[::2], asked[::2], use_tqdm=False)
    for ours, theirs in zip(found, expected, strict=True):
        mine, known = ours.outputs[0], theirs.outputs[0]
        assert mine.token_ids == known.token_ids
        for a, b in zip(mine.logprobs or (), known.logprobs or (), strict=True):
            assert list(a) == list(b)
            assert all(a[t].logprob == pytest.approx(b[t].logprob, abs=1e-4) for t in b)
    assert likely.judged > 50
    assert max(likely.accepted) == 3


def test_seeded_typical_text_is_reproducible(medusa: Any, likely: LikelyDrafter) -> None:
    requests = harness.prompts(5, lengths=[2, 9, 33], vocab_size=VOCAB_SIZE, seed=5)
    asked = params(TYPICAL["medusa"], temperature=1.3, seed=11)
    first = texts(medusa, requests, asked)
    assert texts(medusa, requests, asked) == first
    assert [texts(medusa, [request], asked)[0] for request in requests] == first
    other = params(TYPICAL["medusa"], temperature=1.3, seed=12)
    assert texts(medusa, requests, other) != first


def test_placeholders_of_a_cached_prompt_are_not_judged(medusa: Any, likely: LikelyDrafter) -> None:
    """The scheduler pads a request whose whole prompt is cached by -1, which is no token."""
    request = harness.prompts(1, lengths=[65], vocab_size=VOCAB_SIZE, seed=6)
    asked = params(TYPICAL["medusa"], temperature=1.0, seed=2)
    first = texts(medusa, request, asked)
    assert texts(medusa, request, asked) == first
    assert likely.placeholders > 0


def test_settings_of_ended_requests_are_dropped(medusa: Any, likely: LikelyDrafter) -> None:
    runner = harness.runner_of(medusa)
    for _ in range(2):
        texts(medusa, [[1, 2, 3]], params(TYPICAL["medusa"], temperature=1.0))
        assert len(runner._running._settings) == 1
        assert set(runner._running._settings) <= set(runner.requests)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable": False}, "unknown option 'enable'"),
        ({"max_nodes": 64}, "'max_nodes'.*got 64"),
        ("no json", "is not JSON"),
        ({"acceptance": "lossy"}, "'acceptance'.*got 'lossy'"),
    ],
)
def test_bad_options_fail_their_own_call(
    plain: Any, medusa: Any, likely: LikelyDrafter, options: Any, message: str
) -> None:
    requests = harness.prompts(2, lengths=[9], vocab_size=VOCAB_SIZE)
    for asked in (params(options), [params(), params(options)]):
        with pytest.raises(RequestOptionsError, match=message):
            medusa.generate([{"prompt_token_ids": r} for r in requests], asked, use_tqdm=False)
        assert not medusa.llm_engine.has_unfinished_requests()
    with pytest.raises(ValueError, match=message):
        medusa.chat([{"role": "user", "content": "a"}], params(options), use_tqdm=False,
                    chat_template="{{ messages[0].content }}")  # fmt: skip
    assert texts(medusa, requests, params()) == texts(plain, requests, params())


@pytest.mark.parametrize(
    "others",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"min_tokens": 3},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": list(range(100))},
        {"bad_words": ["a"]},
        {"structured_outputs": StructuredOutputsParams(regex="a")},
        {"logprobs": 0},
        {"logprobs": 1, "logprob_token_ids": [3]},
    ],
    ids=lambda others: list(others)[-1],
)
def test_what_excludes_typical_acceptance_is_named(medusa: Any, others: dict[str, Any]) -> None:
    name = list(others)[-1]
    asked = params(TYPICAL["medusa"], temperature=1.0, **others)
    with pytest.raises(RequestOptionsError, match=f"cannot be combined with.*{name}=") as caught:
        texts(medusa, [[1, 2, 3]], asked)
    assert len(str(caught.value)) < 400
    asked = params({"acceptance": "lossless"}, temperature=1.0, **others)
    assert texts(medusa, [[1, 2, 3]], asked)


def test_an_engine_without_medusa_refuses_the_options(plain: Any) -> None:
    with pytest.raises(RequestOptionsError, match="does not speculate with Medusa"):
        texts(plain, [[1, 2, 3]], params({"enabled": False}))
    asked = params()
    asked.extra_args = {"other": 1}
    assert texts(plain, [[1, 2, 3]], asked)


# Typical acceptance as the engine's default


@pytest.fixture(scope="module")
def typical_engine(make_engine: Any, random_heads: Path) -> Any:
    return make_engine(
        speculative_config={
            "method": "medusa",
            "model": str(random_heads),
            "num_speculative_tokens": harness.MAX_NODES,
        },
        additional_config={
            "medusa": {"acceptance": "typical", "typical_epsilon": 0.02, "typical_alpha": 0.1}
        },
    )


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """Messages of the plugin's logger, which vLLM does not pass on to the root."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("vllm.medusa"), Collect(logging.WARNING)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_the_default_and_its_parameters_reach_the_rule(
    typical_engine: Any, tiny_model: Path
) -> None:
    drafter = LikelyDrafter(tiny_model, SMALL, TypicalRule(0.02, 0.1))
    runner = harness.runner_of(typical_engine)
    runner.drafter.drafter = drafter
    requests = harness.prompts(4, lengths=[2, 9, 33], vocab_size=VOCAB_SIZE, seed=7)
    texts(typical_engine, requests, params(temperature=1.0, seed=1))
    assert drafter.judged > 20
    assert runner.accepted_tokens.typical == sum(drafter.accepted)


def test_requests_that_exclude_the_default_are_lossless_and_that_is_said_once(
    plain: Any, typical_engine: Any, tiny_model: Path, warnings: list[str]
) -> None:
    drafter = LikelyDrafter(tiny_model, SMALL, TypicalRule(0.02, 0.1))
    harness.runner_of(typical_engine).drafter.drafter = drafter
    requests = harness.prompts(3, lengths=[2, 9, 33], vocab_size=VOCAB_SIZE, seed=8)
    kinds: list[dict[str, Any]] = [
        {"top_k": 20},
        {"repetition_penalty": 1.2, "top_k": 20},
        {"logprobs": 1},
    ]
    for others in kinds:
        asked = params(temperature=1.0, seed=4, **others)
        assert texts(typical_engine, requests, asked) == texts(plain, requests, asked)
    for name in ("top_k", "repetition_penalty", "logprobs"):
        assert any(name in message for message in warnings)
    assert len(warnings) == 3, "once per parameter, not per request"
    explicit = params({"acceptance": "lossless"}, temperature=1.0, seed=4)
    expected = texts(plain, requests, params(temperature=1.0, seed=4))
    assert texts(typical_engine, requests, explicit) == expected
    assert len(warnings) == 3
    assert drafter.judged == 0
    assert sum(drafter.accepted) > 0


def test_options_that_came_around_the_front_end_do_not_end_the_engine(
    plain: Any, medusa: Any, likely: LikelyDrafter, warnings: list[str]
) -> None:
    """Whoever hands a processed request to the engine core skips the front end's checks."""
    engine = medusa.llm_engine
    request = engine.input_processor.process_inputs(
        "around", {"prompt_token_ids": [1, 2, 3]}, params(max_tokens=8), ("generate",)
    )
    request.sampling_params.extra_args = {"medusa": {"max_nodes": -3}}
    engine.add_request("around", request, request.sampling_params, prompt_text="")
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
    assert tokens == list(texts(plain, [[1, 2, 3]], params(max_tokens=8))[0])
    assert any("options are ignored" in message and "-3" in message for message in warnings)
