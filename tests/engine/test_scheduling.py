"""Mixed batches, chunked prefill, prefix cache, preemption, aborts: output stays that of plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from medusa_plugin.tree.token_tree import TokenTree
from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine()


@pytest.mark.parametrize("draft", harness.HIT_RATES)
def test_prefill_chunks_beside_trees(
    make_engine: Any, plain: Any, random_heads: Path, draft: str
) -> None:
    medusa = make_engine(
        max_num_batched_tokens=64,
        max_num_seqs=4,
        enable_chunked_prefill=True,
        speculative_config=harness.speculation(random_heads),
    )
    requests = harness.prompts(10, lengths=[3, 50, 130, 200], vocab_size=VOCAB_SIZE, seed=1)
    drafter = harness.plant(
        medusa, list(harness.TREES.values()), VOCAB_SIZE, harness.HIT_RATES[draft]
    )
    harness.teach(drafter, plain, requests, GREEDY)
    kinds = record_batches(medusa)
    assert harness.answers(medusa, requests, GREEDY) == harness.answers(plain, requests, GREEDY)
    harness.assert_draft_did_its_part(drafter, harness.BUSHY)
    assert ("tree", "chunk") in kinds, "no batch mixed a tree with a prefill chunk"


def record_batches(engine: Any) -> set[tuple[str, ...]]:
    """Watch which kinds of requests share a batch."""
    runner = harness.runner_of(engine)
    original = runner._grant
    kinds: set[tuple[str, ...]] = set()

    def grant(scheduled: dict[str, list[int]]) -> Any:
        granted = original(scheduled)
        lengths = runner.query_start_loc.np[1 : len(granted.trees) + 1].copy()
        lengths[1:] -= runner.query_start_loc.np[1 : len(granted.trees)]
        seen = set()
        for tree, length in zip(granted.trees, lengths.tolist(), strict=True):
            if not tree.is_chain:
                seen.add("tree")
            elif length > tree.num_rows:
                seen.add("chunk")
            elif not tree.num_nodes:
                seen.add("plain")
        kinds.add(tuple(sorted(seen, reverse=True)))
        return granted

    runner._grant = grant
    return kinds


def test_trees_beside_chunks_and_plain_decode(
    make_engine: Any, plain: Any, random_heads: Path
) -> None:
    """Rows are found by cumulated tree sizes; requests draft in one step and not in the next."""
    medusa = make_engine(
        max_num_batched_tokens=64,
        max_num_seqs=6,
        speculative_config=harness.speculation(random_heads),
    )
    requests = harness.prompts(12, lengths=[3, 50, 130, 200], vocab_size=VOCAB_SIZE, seed=6)
    drafter = harness.plant(
        medusa, [harness.BUSHY, harness.DEEP, TokenTree.chain(0)], VOCAB_SIZE, 0.8
    )
    harness.teach(drafter, plain, requests, GREEDY)
    kinds = record_batches(medusa)
    assert harness.answers(medusa, requests, GREEDY) == harness.answers(plain, requests, GREEDY)
    harness.assert_draft_did_its_part(drafter, harness.BUSHY)
    assert ("tree", "plain", "chunk") in kinds


@pytest.mark.parametrize("draft", harness.HIT_RATES)
def test_prefix_cache_hits_of_every_length(
    make_engine: Any, plain: Any, random_heads: Path, draft: str
) -> None:
    """Whole-prompt hits get -1 placeholder drafts; partial ones resume inside the prompt."""
    medusa = make_engine(
        enable_prefix_caching=True, speculative_config=harness.speculation(random_heads)
    )
    watch_input_ids(medusa)
    [base] = harness.prompts(1, lengths=[130], vocab_size=VOCAB_SIZE, seed=2)
    # The second block-aligned copy is a whole-prompt hit; others share 1, 2, 3 or 4 blocks.
    requests = [base[:129], base[:129], base[:96], base[:97], base[:65], base[:64], base[:33]]
    requests += [[*base[:length], 9, 8, 7] for length in (32, 64, 96, 120)]
    drafter = harness.plant(
        medusa, [harness.BUSHY, harness.DEEP], VOCAB_SIZE, harness.HIT_RATES[draft]
    )
    for request in requests:
        expected = harness.answers(plain, [request], GREEDY)
        drafter.futures = {tuple(request): list(expected[0][0].token_ids)}
        for _ in range(2):
            assert harness.answers(medusa, [request], GREEDY) == expected
    # Generated text is hashed too: continue from it.
    expected = harness.answers(plain, [base[:64]], GREEDY)
    longer = [*base[:64], *expected[0][0].token_ids]
    expected = harness.answers(plain, [longer], GREEDY)
    assert harness.answers(medusa, [longer], GREEDY) == expected


@pytest.mark.parametrize("draft", harness.HIT_RATES)
def test_preemption_with_a_tiny_cache(
    make_engine: Any, plain: Any, random_heads: Path, draft: str
) -> None:
    medusa = make_engine(
        num_gpu_blocks_override=14,
        max_model_len=160,
        speculative_config=harness.speculation(random_heads),
    )
    requests = harness.prompts(8, lengths=[30, 50, 60], vocab_size=VOCAB_SIZE, seed=3)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    drafter = harness.plant(
        medusa, [harness.BUSHY, harness.DEEP], VOCAB_SIZE, harness.HIT_RATES[draft]
    )
    harness.teach(drafter, plain, requests, params)
    watch_input_ids(medusa)
    preempted = watch_preemptions(medusa)
    assert harness.answers(medusa, requests, params) == harness.answers(plain, requests, params)
    assert preempted, "the cache was not small enough to preempt anything"
    harness.assert_draft_did_its_part(drafter, harness.BUSHY)


def scheduler_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core.scheduler


def watch_input_ids(engine: Any) -> None:
    """From now on the model must see token ids only: the scheduler pads drafts with -1."""
    runner = harness.runner_of(engine)
    original = runner._model_forward

    def forward(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert 0 <= int(input_ids.min()) <= int(input_ids.max()) < VOCAB_SIZE
        return original(input_ids, *args, **kwargs)

    runner._model_forward = forward


def watch_preemptions(engine: Any) -> list[str]:
    """Ids of requests preempted from now on; their drafts and trees must be gone by then."""
    scheduler, runner = scheduler_of(engine), harness.runner_of(engine)
    original, original_update = scheduler._preempt_request, runner._update_states
    preempted: list[str] = []

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(request, *args, **kwargs)
        assert not request.spec_token_ids
        preempted.append(request.request_id)
        return result

    def update_states(scheduler_output: Any) -> Any:
        result = original_update(scheduler_output)
        assert not runner._proposed.keys() & (scheduler_output.preempted_req_ids or set())
        return result

    scheduler._preempt_request, runner._update_states = preempt, update_states
    return preempted


def test_abort_and_reuse_of_a_request_id(make_engine: Any, plain: Any, random_heads: Path) -> None:
    medusa = make_engine(speculative_config=harness.speculation(random_heads))
    first, second, other = harness.prompts(3, lengths=[20], vocab_size=VOCAB_SIZE, seed=4)
    drafter = harness.plant(medusa, [harness.BUSHY], VOCAB_SIZE, 1.0)
    harness.teach(drafter, plain, [first, second, other], GREEDY)
    expected = {
        name: harness.answers(plain, [prompt], GREEDY)[0][0].token_ids
        for name, prompt in (("second", second), ("other", other))
    }
    engine = medusa.llm_engine
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    for steps_before_abort in range(1, 6):
        engine.add_request("same-id", {"prompt_token_ids": first}, params)
        engine.add_request("other", {"prompt_token_ids": other}, params)
        for _ in range(steps_before_abort):
            assert all(not output.finished for output in engine.step())
        engine.abort_request(["same-id"])
        engine.add_request("same-id", {"prompt_token_ids": second}, params)
        finished = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = tuple(output.outputs[0].token_ids)
        assert finished == {"same-id": expected["second"], "other": expected["other"]}
    runner = harness.runner_of(medusa)
    assert not runner.requests or set(runner._proposed) <= set(runner.requests)
    # A step in which there is nothing to do, and whatever aborted requests held.
    engine.add_request("last", {"prompt_token_ids": first}, params)
    engine.step()
    engine.abort_request(["last"])
    assert engine.step() == []
    pool = scheduler_of(medusa).kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks leaked"
    assert not runner._proposed


@pytest.mark.parametrize("level", [0, 1])
def test_requests_kept_while_the_engine_sleeps(
    make_engine: Any, plain: Any, random_heads: Path, level: int
) -> None:
    """On a CPU sleeping is a pause; from level 1 on, requests are preempted and start anew."""
    medusa = make_engine(speculative_config=harness.speculation(random_heads))
    requests = harness.prompts(4, lengths=[20, 70], vocab_size=VOCAB_SIZE, seed=7)
    drafter = harness.plant(medusa, [harness.BUSHY], VOCAB_SIZE, 0.7)
    harness.teach(drafter, plain, requests, GREEDY)
    watch_input_ids(medusa)
    preempted = watch_preemptions(medusa)
    engine = medusa.llm_engine
    params = GREEDY.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    for i, request in enumerate(requests):
        engine.add_request(str(i), {"prompt_token_ids": request}, params)
    finished = {}
    for round_ in range(200):
        if round_ in (2, 5):
            medusa.sleep(level=level, mode="keep")
            assert engine.step() == []
            medusa.wake_up()
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = tuple(output.outputs[0].token_ids)
        if not engine.has_unfinished_requests():
            break
    assert [finished[str(i)] for i in range(4)] == harness.texts(plain, requests, GREEDY)
    assert bool(preempted) == (level > 0)


@pytest.mark.parametrize("shape", ["bushy", "deep", "wide"])
def test_committed_kv_equals_that_of_a_fresh_prefill(
    make_engine: Any, random_heads: Path, shape: str
) -> None:
    """Compaction leaves exactly the rows that a prefill of prompt and output writes."""
    from tvm_ops.layouts import read_rows

    medusa = make_engine(
        enable_prefix_caching=False, speculative_config=harness.speculation(random_heads)
    )
    [prompt] = harness.prompts(1, lengths=[45], vocab_size=VOCAB_SIZE, seed=5)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    drafter = harness.plant(medusa, [harness.TREES[shape]], VOCAB_SIZE, 0.0)
    output = harness.answers(medusa, [prompt], params)[0][0].token_ids
    drafter.learn(prompt, output)
    drafter.hit_rate = 0.8

    def committed(request: list[int], max_tokens: int, length: int) -> list[torch.Tensor]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        runner = harness.runner_of(medusa)
        snapshot: list[torch.Tensor] = []
        original = runner.sample_tokens

        def sample_tokens(grammar_output: Any) -> Any:
            result = original(grammar_output)
            group = runner.kv_cache_group
            position = torch.arange(length)
            blocks = torch.from_numpy(runner.input_batch.block_table[0].get_numpy_array()[0].copy())
            slots = blocks[position // group.block_size].long() * group.block_size
            slots += position % group.block_size
            snapshot[:] = [
                rows
                for layer in medusa_caches(runner)
                for rows in read_rows(layer, group.layout, slots)
            ]
            return result

        runner.sample_tokens = sample_tokens
        try:
            harness.answers(medusa, [request], params)
        finally:
            runner.sample_tokens = original
        return [rows.clone() for rows in snapshot]

    length = len(prompt) + len(output) - 1
    ours = committed(prompt, len(output), length)
    assert sum(drafter.accepted) > 5
    fresh = committed([*prompt, *output[:-1]], 1, length)
    assert len(ours) == len(fresh) == 4
    for mine, theirs in zip(ours, fresh, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


def medusa_caches(runner: Any) -> list[torch.Tensor]:
    return list(runner.kv_caches)
