"""What a request may ask for itself: no drafts, smaller trees; and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from medusa_plugin.batch import StepRequest
from medusa_plugin.request_options import RequestOptionsError
from medusa_plugin.tree.draft_tree import DraftTree
from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine()


@pytest.fixture(scope="module")
def medusa(make_engine: Any, random_heads: Path) -> Any:
    return make_engine(
        speculative_config=harness.speculation(random_heads),
        additional_config={"medusa": {"sizes": "fixed"}},
    )


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
    assert harness.texts(medusa, requests, asked) == harness.texts(plain, requests, params())
    assert verified[False] == 0
    assert verified[True] > 0 and sum(drafter.accepted) > 0


def test_heads_are_not_evaluated_where_nobody_wants_drafts(
    plain: Any, medusa: Any, real_drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = harness.prompts(3, lengths=[9, 33], vocab_size=VOCAB_SIZE)
    monkeypatch.setattr(real_drafter.heads, "propose", None)
    asked = params('{"enabled": false}')  # as the server hands it on
    assert harness.texts(medusa, requests, asked) == harness.texts(plain, requests, params())


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
    assert harness.texts(medusa, requests, asked) == harness.texts(plain, requests, params())
    assert proposed == {None: {most}, 1: {1}, 3: {3}, 63: {most}}


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
    plain: Any, medusa: Any, options: Any, message: str
) -> None:
    requests = harness.prompts(2, lengths=[9], vocab_size=VOCAB_SIZE)
    for asked in (params(options), [params(), params(options)]):
        with pytest.raises(RequestOptionsError, match=message):
            medusa.generate([{"prompt_token_ids": r} for r in requests], asked, use_tqdm=False)
        assert not medusa.llm_engine.has_unfinished_requests()
    with pytest.raises(ValueError, match=message):
        medusa.chat([{"role": "user", "content": "a"}], params(options), use_tqdm=False,
                    chat_template="{{ messages[0].content }}")  # fmt: skip
    assert harness.texts(medusa, requests, params()) == harness.texts(plain, requests, params())


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
    asked = params({"acceptance": "typical"}, temperature=1.0, **others)
    with pytest.raises(RequestOptionsError, match=f"cannot be combined with.*{name}=") as caught:
        harness.texts(medusa, [[1, 2, 3]], asked)
    assert len(str(caught.value)) < 400
    asked = params({"acceptance": "lossless"}, temperature=1.0, **others)
    assert harness.texts(medusa, [[1, 2, 3]], asked)


def test_an_engine_without_medusa_refuses_the_options(plain: Any) -> None:
    with pytest.raises(RequestOptionsError, match="does not speculate with Medusa"):
        harness.texts(plain, [[1, 2, 3]], params({"enabled": False}))
    asked = params()
    asked.extra_args = {"other": 1}
    assert harness.texts(plain, [[1, 2, 3]], asked)


def test_options_that_came_around_the_front_end_do_not_end_the_engine(
    plain: Any, medusa: Any, warnings: list[str]
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
    assert tokens == list(harness.texts(plain, [[1, 2, 3]], params(max_tokens=8))[0])
    assert any("options are ignored" in message and "-3" in message for message in warnings)
