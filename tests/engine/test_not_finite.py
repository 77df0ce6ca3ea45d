"""NaN and infinity in one request: it ends with an error, and nobody else notices.

Plain vLLM samples from NaN as from any number and answers with whatever token comes out.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE

REQUESTS = harness.prompts(4, lengths=[9, 40, 70], vocab_size=VOCAB_SIZE, seed=5)
VICTIM = 1
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True)
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED}


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine()


@pytest.fixture(scope="module")
def medusa(make_engine: Any, random_heads: Path) -> Any:
    return make_engine(
        # Few blocks, so that those of a failed request are soon another's.
        num_gpu_blocks_override=20,
        max_num_batched_tokens=64,  # long prompts are prefilled in chunks
        enable_prefix_caching=True,
        speculative_config=harness.speculation(random_heads),
        additional_config={"medusa": {"sizes": "fixed"}},
    )


def free_blocks(engine: Any) -> int:
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free


@contextmanager
def poisoned_from(
    engine: Any, prompt: list[int], position: int, value: float, end: int = sys.maxsize
) -> Iterator[None]:
    """The final hidden states of the request with `prompt` are `value` from `position` to `end`."""
    runner = harness.runner_of(engine)

    def poison(module: Any, arguments: Any, outputs: tuple[torch.Tensor, Any]) -> None:
        hidden = outputs[0]
        starts = runner.query_start_loc.np
        for i, request_id in enumerate(runner.input_batch.req_ids):
            if runner.requests[request_id].prompt_token_ids == prompt:
                rows = slice(int(starts[i]), int(starts[i + 1]))
                positions = runner.positions[rows]
                hidden[rows][(positions >= position) & (positions < end)] = value

    handle = runner.model.model.norm.register_forward_hook(poison)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def poisoned_token(engine: Any, token: int) -> Iterator[None]:
    """Whoever reads `token` has NaN in all layers and in its KV cache."""
    weight = harness.runner_of(engine).model.model.embed_tokens.weight.data
    kept = weight[token].clone()
    weight[token] = math.nan
    try:
        yield
    finally:
        weight[token] = kept


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_it_ends_where_the_numbers_end(
    plain: Any, medusa: Any, draft: str, value: float, kind: str, warnings: list[str]
) -> None:
    params = PARAMS[kind]
    expected = harness.answers(plain, REQUESTS, params)
    drafter = harness.plant(
        medusa, [harness.BUSHY, harness.DEEP], VOCAB_SIZE, harness.HIT_RATES[draft]
    )
    harness.teach(drafter, plain, REQUESTS, params)
    free = free_blocks(medusa)
    prompt = REQUESTS[VICTIM]
    # Nothing at all, tokens in the middle of a path or at its end, all but the last.
    for good in (0, 5, 6, 7, 23):
        with poisoned_from(medusa, prompt, len(prompt) - 1 + good, value):
            found = harness.answers(medusa, REQUESTS, params)
        [failed] = found[VICTIM]
        assert (failed.token_ids, failed.finish_reason) == (
            expected[VICTIM][0].token_ids[:good],
            "error",
        )
        assert found[:VICTIM] + found[VICTIM + 1 :] == expected[:VICTIM] + expected[VICTIM + 1 :]
        assert sum("are NaN or infinite" in warning for warning in warnings) == 1
        warnings.clear()
        assert free_blocks(medusa) == free
    # One token more is not asked for, so its row does not matter.
    with poisoned_from(medusa, prompt, len(prompt) - 1 + 24, value):
        assert harness.answers(medusa, REQUESTS, params) == expected
    assert not warnings
    assert harness.answers(medusa, REQUESTS, params) == expected


@pytest.mark.parametrize("draft", harness.HIT_RATES)
def test_a_token_without_numbers(plain: Any, medusa: Any, draft: str) -> None:
    """Neither its rows in rejected branches nor its blocks, given to others later, do harm."""
    expected = harness.answers(plain, REQUESTS, GREEDY)
    used = {token for request in REQUESTS for token in request}
    used |= {token for [answer] in expected for token in answer.token_ids}
    token = min(set(range(VOCAB_SIZE - 30)) - used)
    poisoned = [[*REQUESTS[0][:9], token, *REQUESTS[0]], [token]]
    well = harness.answers(plain, poisoned, GREEDY)
    drafter = harness.plant(medusa, [harness.WIDE], VOCAB_SIZE, harness.HIT_RATES[draft])
    sound = [other for other in range(9) if other != token]
    turns = itertools.cycle([([harness.WIDE], [token, *sound]), ([harness.CHAIN], sound)])

    def take_turns(step: Any) -> None:
        # Chains are vLLM's own kernel's, which reads what wide trees have left behind.
        drafter.topologies, drafter.alphabet = next(turns)

    drafter.on_draft = take_turns
    harness.teach(drafter, plain, REQUESTS, GREEDY)
    free = free_blocks(medusa)
    medusa.reset_prefix_cache()  # the answers of another run would be hits
    with poisoned_token(medusa, token):
        for _ in range(3):
            *found, first, second = harness.answers(medusa, [*REQUESTS, *poisoned], GREEDY)
            assert found == expected
            for [answer] in (first, second):
                assert (answer.token_ids, answer.finish_reason) == ((), "error")
    assert free_blocks(medusa) == free
    # Had their blocks stayed in the prefix cache, these would fail once more.
    assert harness.answers(medusa, [*REQUESTS, *poisoned], GREEDY) == [*expected, *well]
    assert drafter.branching_steps > 0


@pytest.mark.parametrize("ending", ["abort between steps", "abort in a step", "none"])
@pytest.mark.parametrize("place", [3, 60, 70])
def test_a_prefill_in_chunks_that_is_given_up(
    plain: Any, medusa: Any, ending: str, place: int
) -> None:
    """Whatever becomes of a request whose prompt is not all read: its blocks do no harm."""
    token = VOCAB_SIZE - 1
    others = harness.prompts(6, lengths=[3, 9, 40], vocab_size=token, seed=8)
    expected = harness.answers(plain, others, GREEDY)
    harness.plant(medusa, [harness.CHAIN], VOCAB_SIZE, 0.0)  # vLLM's own kernel alone
    medusa.reset_prefix_cache()
    free = free_blocks(medusa)
    engine = medusa.llm_engine
    core = engine.engine_core.engine_core
    runner = harness.runner_of(medusa)

    def abort(*_: Any) -> None:
        if ending == "abort in a step":
            core.aborts_queue.put(list(core.scheduler.requests))

    finished = []
    with poisoned_token(medusa, token):
        for i in range(3):
            prompt = [i, *range(20, 120)]
            prompt[place] = token
            engine.add_request(str(i), {"prompt_token_ids": prompt}, GREEDY)
        handle = runner.model.register_forward_hook(abort)
        while core.scheduler.has_unfinished_requests():
            finished += engine.step()
            if ending == "abort between steps":
                core.abort_requests(list(core.scheduler.requests))
        handle.remove()
        engine.abort_request(["0", "1", "2"])  # the front end knows nothing of it
    if ending == "none":
        assert [output.outputs[0].finish_reason for output in finished] == ["error"] * 3
    assert free_blocks(medusa) == free
    assert harness.answers(medusa, others, GREEDY) == expected


def test_rows_that_the_last_one_does_not_see(plain: Any, medusa: Any) -> None:
    """Behind a sliding window they do not show in the logits."""
    prompt = REQUESTS[VICTIM]
    expected = harness.answers(plain, REQUESTS, GREEDY)
    with poisoned_from(medusa, prompt, 2, math.nan, end=3):
        medusa.reset_prefix_cache()
        found = harness.answers(medusa, REQUESTS, GREEDY)
    assert (found[VICTIM][0].token_ids, found[VICTIM][0].finish_reason) == ((), "error")
    assert found[:VICTIM] + found[VICTIM + 1 :] == expected[:VICTIM] + expected[VICTIM + 1 :]


def test_only_those_who_read_it_fail(plain: Any, medusa: Any) -> None:
    """Of several answers to one prompt, behind a common prefix, under a grammar."""
    params = SAMPLED.clone()
    params.n = 3
    grammar = GREEDY.clone()
    grammar.structured_outputs = StructuredOutputsParams(regex="[a-z]{24}")
    prefix = REQUESTS[VICTIM][:2] * 35
    token = VOCAB_SIZE - 1
    drafter = harness.plant(medusa, [harness.BUSHY], token, 0.6)
    several = [REQUESTS[0], REQUESTS[VICTIM]]
    known = harness.answers(plain, several, params)
    harness.teach(drafter, plain, REQUESTS, GREEDY)
    # A token that one of the answers has and that the others have not.
    first, *others = (set(answer.token_ids[:-1]) for answer in known[1])
    theirs = set().union(*others, *several, *(answer.token_ids for answer in known[0]))
    read = next(t for t in known[1][0].token_ids if t in first - theirs)
    with poisoned_token(medusa, read):
        found = harness.answers(medusa, several, params)
    assert found[0] == known[0] and found[1][1:] == known[1][1:]
    end = known[1][0].token_ids.index(read) + 1
    failed = found[1][0]
    assert (failed.token_ids, failed.finish_reason) == (known[1][0].token_ids[:end], "error")
    last = REQUESTS[VICTIM][-1]
    assert last not in [*REQUESTS[0], *(t for answer in known[0] for t in answer.token_ids)]
    with poisoned_token(medusa, last):
        found = harness.answers(medusa, several, params)
    assert found[0] == known[0]
    assert [answer.finish_reason for answer in found[1]] == ["error"] * 3

    shared = [[*prefix, *request] for request in ([5, 6], [token], [5, token], [7, 8])]
    for tuning in (GREEDY, grammar):
        expected = harness.answers(plain, shared, tuning)
        for prepared in (True, False):  # the prefix is in the cache before; all come at once
            medusa.reset_prefix_cache()
            if prepared:
                assert harness.answers(medusa, shared[:1], tuning) == expected[:1]
            with poisoned_token(medusa, token):
                found = harness.answers(medusa, shared, tuning)
            assert [answer.finish_reason for [answer] in found[1:3]] == ["error"] * 2
            assert found[::3] == expected[::3]
            assert harness.answers(medusa, shared, tuning) == expected


def test_a_failed_prefill_with_prompt_logprobs(plain: Any, medusa: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2, logprobs=2)
    prompt = REQUESTS[VICTIM]
    with poisoned_from(medusa, prompt, len(prompt) - 1, math.nan):
        found = harness.answers(medusa, REQUESTS, params)
    assert found[VICTIM][0].finish_reason == "error"
    expected = harness.answers(plain, REQUESTS, params)
    assert found[:VICTIM] + found[VICTIM + 1 :] == expected[:VICTIM] + expected[VICTIM + 1 :]


def test_heads_without_numbers_draft_nothing_and_forget_nothing(plain: Any, medusa: Any) -> None:
    """What is learnt about heads is learnt from all requests: one NaN there would last."""
    runner = harness.runner_of(medusa)
    runner.drafter.load_model(runner.model)
    drafter = runner.medusa_drafter
    propose, calls = drafter.heads.propose, []

    def damaged(hidden: torch.Tensor, *rest: Any) -> Any:
        calls.append(len(hidden))
        hidden = hidden.clone()
        hidden[0] = math.nan
        return propose(hidden, *rest)

    drafter.heads.propose = damaged
    assert harness.answers(medusa, REQUESTS, GREEDY) == harness.answers(plain, REQUESTS, GREEDY)
    assert max(calls) == len(REQUESTS)
    assert all(math.isfinite(ratio) for ratio in drafter.estimate.head_ratios())
