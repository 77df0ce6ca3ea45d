"""Structured output under Medusa: each row of a tree is masked as its own path demands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from vllm import SamplingParams
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import StructuredOutputsParams

from tests.engine import harness
from tests.engine.conftest import EOS_TOKEN_ID, MARKS, VOCAB_SIZE
from tests.engine.drafters import PlantedDrafter

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{3}-[0-9]{4}"
CHOICES = [a + b + c for a in "rbt" for b in "aeo" for c in ("d", "ge", "n")]
GRAMMAR = 'root ::= "get " name (", " name)* ";"\nname ::= [a-d] [a-d]?'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "regex", "pattern": "[a-f]{2,6}"},
        "end": "</f>",
    },
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "json_object": {"json_object": True},
    "regex": {"regex": REGEX},
    "choice": {"choice": CHOICES},
    "grammar": {"grammar": GRAMMAR},
    "structural_tag": {"structural_tag": json.dumps(TAG)},
    "endless": {"regex": r"([a-f]{3}-[0-9]{2} )*"},
}
CHARACTERS = {
    "json": '{}":,abxyes0123456789',
    "json_object": '{}[]":,abxyes0123',
    "regex": "abcdef-0123456789",
    "choice": "rbtaeodgn",
    "grammar": "get abcd,;",
    "structural_tag": "<f>abcde/",
    "endless": "abcdef-01234 ",
}
CONFORMS: dict[str, Callable[[str], Any]] = {
    "free": lambda text: True,
    "json": lambda text: json.loads(text)["b"] in ("x", "yes"),
    "json_object": lambda text: isinstance(json.loads(text), dict),
    "regex": re.compile(REGEX).fullmatch,
    "choice": CHOICES.__contains__,
    "grammar": re.compile(r"get [a-d]{1,2}(, [a-d]{1,2})*;").fullmatch,
    "structural_tag": re.compile(r"<f>[a-f]{2,6}</f>").fullmatch,
    "endless": re.compile(r"([a-f]{3}-[0-9]{2} )*").fullmatch,
}


# Without whitespace, in which a random model would go on for ever.
CONFIG = {"backend": "xgrammar", "disable_any_whitespace": True}


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine(structured_outputs_config=CONFIG)


@pytest.fixture(scope="module")
def medusa(make_engine: Any, random_heads: Path) -> Any:
    return make_engine(
        structured_outputs_config=CONFIG,
        # So little room that many requests are chunked and preempted.
        max_num_batched_tokens=64,
        num_gpu_blocks_override=12,
        speculative_config=harness.speculation(random_heads),
    )


def prompts(count: int, seed: int, lengths: Sequence[int] = (4, 20)) -> list[list[int]]:
    """Of printable characters: an odd byte at the end would show in the text of the answer."""
    return harness.prompts(count, lengths=lengths, vocab_size=94, seed=seed)


def bound(kind: str, **params: Any) -> SamplingParams:
    return SamplingParams(
        structured_outputs=StructuredOutputsParams(**CONSTRAINTS[kind]),
        **{"temperature": 0, "max_tokens": 24, **params},
    )


def plant(
    medusa: Any,
    requests: Sequence[list[int]],
    expected: Sequence[Sequence[harness.Answer]],
    hit_rate: float,
    kinds: Iterable[str],
) -> PlantedDrafter:
    """Wrong tokens are of characters that the grammars allow somewhere, or the end token."""
    drafter = harness.plant(medusa, [harness.BUSHY, harness.DEEP], VOCAB_SIZE, hit_rate)
    characters = "".join(sorted({c for kind in kinds for c in CHARACTERS[kind]}))
    drafter.alphabet = [*medusa.get_tokenizer().encode(characters), EOS_TOKEN_ID]
    for request, answers in zip(requests, expected, strict=True):
        drafter.learn(request, answers[0].token_ids)
    return drafter


@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_constrained_output_equals_plain(
    plain: Any, medusa: Any, kind: str, temperature: float, draft: str
) -> None:
    requests = prompts(3, seed=1)
    params = bound(kind, temperature=temperature, seed=5)
    expected = harness.answers(plain, requests, params)
    drafter = plant(medusa, requests, expected, harness.HIT_RATES[draft], [kind])
    assert harness.answers(medusa, requests, params) == expected
    assert drafter.branching_steps > 0
    assert (sum(drafter.accepted) > 0) == (draft != "adversarial")
    assert_conforms([kind] * 3, expected)


def assert_conforms(kinds: Sequence[str], found: Sequence[Sequence[harness.Answer]]) -> None:
    """Texts that were cut off conform only so far."""
    ended = [
        (kind, answer.text)
        for kind, answers in zip(kinds, found, strict=True)
        for answer in answers
        if answer.finish_reason == "stop"
    ]
    assert ended, "no text came to its end"
    for kind, text in ended:
        assert CONFORMS[kind](text), text


@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("kind", ["json", "regex", "choice"])
@pytest.mark.parametrize("backend", ["guidance", "outlines"])
def test_other_backends(
    plain: Any, medusa: Any, monkeypatch: pytest.MonkeyPatch, backend: str, kind: str, draft: str
) -> None:
    for engine in (plain, medusa):
        use_backend(engine, backend, monkeypatch)
    requests = prompts(3, seed=1)
    params = bound(kind, temperature=0.9, seed=5)
    expected = harness.answers(plain, requests, params)
    drafter = plant(medusa, requests, expected, harness.HIT_RATES[draft], [kind])
    assert harness.answers(medusa, requests, params) == expected
    assert drafter.branching_steps > 0
    assert (sum(drafter.accepted) > 0) == (draft != "adversarial")
    assert_conforms([kind] * 3, expected)


@pytest.mark.parametrize("shape", ["chain", "bushy"])
@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines"])
def test_text_that_goes_on_behind_the_end_of_its_grammar(
    plain: Any, medusa: Any, monkeypatch: pytest.MonkeyPatch, backend: str, shape: str
) -> None:
    """guidance takes what follows an end token in a later step only."""
    for engine in (plain, medusa):
        use_backend(engine, backend, monkeypatch)
    requests = prompts(3, seed=1)
    params = bound("regex", temperature=0.0)
    params.ignore_eos, params.max_tokens = True, 40
    expected = harness.answers(plain, requests, params)
    assert {answers[0].finish_reason for answers in expected} == {"length"}
    drafter = plant(medusa, requests, expected, 1.0, ["regex"])
    drafter.topologies = [harness.TREES[shape]]
    assert harness.answers(medusa, requests, params) == expected
    assert sum(drafter.accepted) > 0


def use_backend(engine: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the engine had been started with another grammar backend."""
    inner = engine.llm_engine
    monkeypatch.setattr(inner.vllm_config.structured_outputs_config, "backend", backend)
    manager = manager_of(engine)
    for name in ("backend", "_grammar_bitmask"):
        monkeypatch.setattr(manager, name, None)


def manager_of(engine: Any) -> Any:
    return scheduler_of(engine).structured_output_manager


def scheduler_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core.scheduler


def test_each_row_is_masked_as_its_own_path_demands(
    plain: Any, medusa: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a matcher of the test's own that reads the request's output and the path."""
    requests = prompts(4, seed=6)
    kinds = ["json", "regex", "choice", "grammar"]
    params = [bound(kind) for kind in kinds]
    expected = harness.answers(plain, requests, params)
    plant(medusa, requests, expected, harness.HIT_RATES["mixed"], kinds)
    scheduler, runner = scheduler_of(medusa), harness.runner_of(medusa)
    original = scheduler.get_grammar_bitmask
    checked = {"allowed": 0, "refused": 0}

    def get_grammar_bitmask(scheduler_output: Any) -> Any:
        output = original(scheduler_output)
        if output is None:
            return None
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        first_row = 0
        for request_id in output.structured_output_request_ids:
            request = scheduler.requests[request_id]
            tokens = scheduled.get(request_id, [])
            tree = runner._proposed[request_id].granted(tokens) if tokens else None
            mask: list[int] | None = []
            for row in range(1 + len(tokens)):
                path = tree.tokens_of(tree.path(row)) if tree is not None else []
                mask = mask_after(request, [*request.output_token_ids, *path])
                if mask is not None:
                    assert output.grammar_bitmask[first_row + row].tolist() == mask
                checked["refused" if mask is None else "allowed"] += row > 0
            assert mask is not None, "a draft ends in a node that the grammar refuses"
            first_row += 1 + len(tokens)
        assert first_row == len(output.grammar_bitmask)
        return output

    monkeypatch.setattr(scheduler, "get_grammar_bitmask", get_grammar_bitmask)
    assert harness.answers(medusa, requests, params) == expected
    assert min(checked.values()) > 10, checked


def mask_after(request: Any, tokens: Sequence[int]) -> list[int] | None:
    """What the request's grammar allows after `tokens`; None if it refuses one of them."""
    grammar = request.structured_output_request.grammar
    matcher = xgrammar.GrammarMatcher(grammar.ctx, override_stop_tokens=[EOS_TOKEN_ID])
    for token in tokens:
        if matcher.is_terminated() or not matcher.accept_token(token):
            return None
    if matcher.is_terminated():
        return [-1] * -(-VOCAB_SIZE // 32)
    bitmask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)
    matcher.fill_next_token_bitmask(bitmask)
    mask: list[int] = bitmask[0].tolist()
    return mask


def watch_token(engine: Any, token: int, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each path that gains `token` from now on, whether it was a node; else the bonus token."""
    seen: list[bool] = []

    def count(step_requests: Sequence[Any], paths: Sequence[Any]) -> None:
        for path in paths:
            if token in path.tokens:
                seen.append(path.tokens.index(token) < len(path.rows))

    monkeypatch.setattr(harness.runner_of(engine).accepted_tokens, "count", count)
    return seen


def test_a_grammar_ends_inside_an_accepted_path(
    plain: Any, medusa: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end token is accepted as a node; what follows it in the tree never shows."""
    requests = prompts(6, seed=1)
    params = bound("choice")
    expected = harness.answers(plain, requests, params)
    plant(medusa, requests, expected, harness.HIT_RATES["oracle"], ["choice"])
    ends = watch_token(medusa, EOS_TOKEN_ID, monkeypatch)
    assert harness.answers(medusa, requests, params) == expected
    assert_conforms(["choice"] * 6, expected)
    assert len(ends) == 6
    assert any(ends), "no end token was a node"


@pytest.mark.parametrize("draft", harness.HIT_RATES)
def test_constrained_requests_among_others(
    plain: Any, medusa: Any, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """Free requests, n > 1, limits of their own, prefill chunks, prefix hits, preemption."""
    kinds = [None, *CONSTRAINTS] * 2
    requests = prompts(len(kinds), seed=2, lengths=[30, 50, 90])
    long = max(requests, key=len)
    requests[-2:] = [long[:64], [*long[:70], 5]]
    params = []
    for i, kind in enumerate(kinds):
        own = {"temperature": 0.9 * (i % 2), "seed": i, "max_tokens": 60, "n": 1 + (i in (3, 9))}
        params.append(bound(kind, **own) if kind else SamplingParams(ignore_eos=True, **own))
    expected = harness.answers(plain, requests, params)
    options = [{"enabled": False}, {"max_nodes": 2}, {"max_nodes": 9}]
    for i, option in enumerate(options, start=5):
        params[i].extra_args = {"medusa": option}
    drafter = plant(medusa, requests, expected, harness.HIT_RATES[draft], CONSTRAINTS)
    preempted, trees = watch(medusa, monkeypatch)
    assert harness.answers(medusa, requests, params) == expected
    assert any(preempted), "no constrained request was preempted"
    assert trees["free"] and trees["constrained"], "a kind of request had no trees"
    assert sum(drafter.accepted) > 0 or draft == "adversarial"
    assert_conforms([kind or "free" for kind in kinds], expected)


def watch(medusa: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], dict[str, int]]:
    """Collect whom preemptions hit (a constrained request?), and branching trees by kind."""
    preempted: list[bool] = []
    trees = {"free": 0, "constrained": 0}
    scheduler, counter = scheduler_of(medusa), harness.runner_of(medusa).accepted_tokens
    original, original_count = scheduler._preempt_request, counter.count

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.use_structured_output)
        return original(request, *args, **kwargs)

    def count(step_requests: Sequence[Any], paths: Any) -> None:
        for request in step_requests:
            bound = scheduler.requests[request.request_id].use_structured_output
            trees["constrained" if bound else "free"] += not request.tree.is_chain
        original_count(step_requests, paths)

    monkeypatch.setattr(scheduler, "_preempt_request", preempt)
    monkeypatch.setattr(counter, "count", count)
    return preempted, trees


@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("kind", ["json", "regex", "choice"])
def test_reasoning_is_free_and_the_answer_is_not(
    plain: Any, medusa: Any, monkeypatch: pytest.MonkeyPatch, kind: str, draft: str
) -> None:
    """Reasoning ends somewhere inside the trees."""
    parser = ReasoningParserManager.get_reasoning_parser("deepseek_r1")
    for engine in (plain, medusa):
        monkeypatch.setattr(manager_of(engine), "reasoner_cls", parser)
    [end] = [token for token, mark in MARKS.items() if mark == "</think>"]
    requests = prompts(6, seed=3)
    requests[0].append(end)
    params = [
        bound(kind, temperature=0.9, seed=i, max_tokens=48, logit_bias={end: 4.0 + i})
        for i in range(len(requests))
    ]
    expected = harness.answers(plain, requests, params)
    drafter = plant(medusa, requests, expected, harness.HIT_RATES[draft], [kind])
    drafter.alphabet = [*drafter.alphabet, end]
    boundaries = watch_token(medusa, end, monkeypatch)
    assert harness.answers(medusa, requests, params) == expected
    assert drafter.branching_steps > 0
    # A mixed draft misses all six now and then: which step it drafts in depends on when the
    # grammars are compiled, and that happens in threads.
    assert any(boundaries) or draft != "oracle", "no end of reasoning was a node"
    ended = [answer for [answer] in expected[1:] if answer.finish_reason == "stop"]
    answered = [answer.text.partition("</think>")[2] for answer in ended]
    assert len(ended) > 2
    assert all(map(CONFORMS[kind], answered))


@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("kind", ["json", "endless"])
def test_no_walk_enters_what_the_grammar_refuses(
    plain: Any, medusa: Any, kind: str, draft: str, warnings: list[str]
) -> None:
    """Where another parameter bans all that the grammar allows, any token may be drawn, and the
    grammar ends the request with it, even if it was drafted and so was what follows."""
    requests = prompts(5, seed=5)
    limits = {"json": {"bad_words": ['"']}, "endless": {"allowed_token_ids": [*range(30, 70)]}}
    params = bound(kind, **limits[kind])
    expected = harness.answers(plain, requests, params)
    assert "error" in {answer.finish_reason for [answer] in expected}
    drafter = plant(medusa, requests, expected, harness.HIT_RATES[draft], [kind])
    drafter.alphabet = [*drafter.alphabet, 0]
    for request, [answer] in zip(requests, expected, strict=True):
        drafter.learn(request, [*answer.token_ids, *range(100, 108)])
    for seed in range(6):
        drafter._random.seed(seed)
        warnings.clear()
        assert harness.answers(medusa, requests, params) == expected
        # Each is told what happened to it, and nothing else.
        failed = [answer for [answer] in expected if answer.finish_reason == "error"]
        assert len(warnings) == len(failed)
        assert all("together allow no token" in warning for warning in warnings)
