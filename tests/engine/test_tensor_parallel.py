"""Tensor parallel 2: the output of one process, and ranks that cannot part.

The ranks have different random states, clocks, delays and logits throughout: see `ranks.disturb`.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from medusa_plugin.heads import TargetSpec, load_heads
from tests.engine import harness, ranks
from tests.engine.conftest import HIDDEN_SIZE, VOCAB_SIZE
from tests.engine.drafters import PlantedDrafter
from tests.engine.test_stress import assert_equal, random_arrivals
from tests.engine.test_stress import run as run_arrivals

pytestmark = pytest.mark.timeout(300)  # a rank that waits for another one fails the test

MAX_MODEL_LEN = 256
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=32),
    "penalties": SamplingParams(
        temperature=0.8, seed=6, repetition_penalty=1.3, min_tokens=9, max_tokens=24
    ),
}


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine()


@pytest.fixture(scope="module")
def medusa(make_engine: Any, random_heads: Path) -> Any:
    engine = make_engine(
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        num_gpu_blocks_override=20,  # so that requests are preempted
        max_model_len=MAX_MODEL_LEN,
        speculative_config=harness.speculation(random_heads),
    )
    engine.collective_rpc(ranks.disturb)
    engine.collective_rpc(ranks.watch)
    return engine


def agreed_steps(engine: Any) -> list[ranks.Step]:
    """The steps since the last call, after a check that both ranks saw the same."""
    first, second = engine.collective_rpc(ranks.take_steps)
    assert first, "no step ran"
    assert first == second, "the ranks parted"
    return first


def planted(engine: Any) -> PlantedDrafter:
    return engine.collective_rpc(ranks.planted)[0]


@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("name", PARAMS)
def test_output_is_that_of_one_process(plain: Any, medusa: Any, name: str, draft: str) -> None:
    requests = harness.prompts(6, lengths=[3, 17, 40], vocab_size=VOCAB_SIZE, seed=31)
    params = PARAMS[name]
    expected = harness.answers(plain, requests, params)
    drafter = PlantedDrafter(
        [harness.BUSHY, harness.DEEP], VOCAB_SIZE, harness.HIT_RATES[draft], seed=3
    )
    for request, known in zip(requests, expected, strict=True):
        drafter.learn(request, known[0].token_ids)
    medusa.collective_rpc(ranks.plant, args=(drafter,))
    assert harness.answers(medusa, requests, params) == expected
    harness.assert_draft_did_its_part(planted(medusa), harness.BUSHY)
    paths = [rows for step, _ in agreed_steps(medusa) for rows, _ in step]
    assert any(paths) == (draft != "adversarial")


@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_into_the_maximum_length(plain: Any, medusa: Any, name: str, draft: str) -> None:
    requests = harness.prompts(
        4, lengths=[MAX_MODEL_LEN - n for n in (2, 5, 9, 14)], vocab_size=VOCAB_SIZE, seed=32
    )
    params = PARAMS[name].clone()
    params.ignore_eos = True
    expected = harness.answers(plain, requests, params)
    assert {answer.finish_reason for [answer] in expected} == {"length"}
    drafter = PlantedDrafter(
        [harness.BUSHY, harness.WIDE], VOCAB_SIZE, harness.HIT_RATES[draft], seed=4
    )
    for request, known in zip(requests, expected, strict=True):
        drafter.learn(request, [*known[0].token_ids, *range(8)])
    medusa.collective_rpc(ranks.plant, args=(drafter,))
    assert harness.answers(medusa, requests, params) == expected
    agreed_steps(medusa)


@pytest.mark.parametrize("seed", range(2))
def test_random_traffic(plain: Any, medusa: Any, seed: int) -> None:
    """Arrivals, aborts, preemption, logprobs, grammars: all parameters mixed."""
    pick = random.Random(77 + seed)
    arrivals = random_arrivals(pick)
    expected = run_arrivals(plain, arrivals, medusa=False)
    drafter = PlantedDrafter(harness.random_trees(pick, 8), VOCAB_SIZE, 0.8, seed)
    for arrival in arrivals:
        drafter.learn(arrival.prompt, expected[arrival.request_id].token_ids)
    medusa.collective_rpc(ranks.plant, args=(drafter,))
    found = run_arrivals(medusa, arrivals, medusa=True)
    agreed_steps(medusa)
    assert_equal(found, expected, arrivals)
    assert sum(planted(medusa).accepted) > 20


def test_prompt_logprobs(plain: Any, medusa: Any) -> None:
    requests = harness.prompts(3, lengths=[3, 18], vocab_size=VOCAB_SIZE, seed=33)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2)
    batch = [{"prompt_token_ids": request} for request in requests]
    drafter = PlantedDrafter([harness.BUSHY], VOCAB_SIZE, 0.0)
    medusa.collective_rpc(ranks.plant, args=(drafter,))
    outputs = [engine.generate(batch, params, use_tqdm=False) for engine in (medusa, plain)]
    for ours, theirs in zip(*outputs, strict=True):
        for mine, known in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
            assert list(mine) == list(known)
            for token, value in known.items():
                assert mine[token].logprob == pytest.approx(value.logprob, abs=1e-4)
    agreed_steps(medusa)


def test_unseeded_sampling_keeps_the_ranks_together(medusa: Any) -> None:
    """Each rank's own generator would draw its own tokens."""
    requests = harness.prompts(6, lengths=[3, 17], vocab_size=VOCAB_SIZE, seed=34)
    params = SamplingParams(temperature=1.2, max_tokens=24, ignore_eos=True)
    drafter = PlantedDrafter([harness.BUSHY], VOCAB_SIZE, 0.7)
    medusa.collective_rpc(ranks.plant, args=(drafter,))
    first = harness.texts(medusa, requests, params)
    assert {len(text) for text in first} == {24}
    for request, text in zip(requests, first, strict=True):
        drafter.learn(request, text)
    medusa.collective_rpc(ranks.plant, args=(drafter,))
    assert harness.texts(medusa, requests, params) != first
    assert any(rows for step, _ in agreed_steps(medusa) for rows, _ in step)


def test_numbers_that_are_not_finite_end_their_request_alone(plain: Any, medusa: Any) -> None:
    """One rank's row of the embedding is damaged: both ranks clean up after who reads it."""
    token = VOCAB_SIZE - 1
    requests = harness.prompts(5, lengths=[9, 40, 70], vocab_size=token, seed=37)
    requests[2][-1] = token
    params = PARAMS["greedy"]
    expected = harness.answers(plain, requests, params)
    drafter = PlantedDrafter([harness.BUSHY, harness.DEEP], VOCAB_SIZE, 0.6)
    # Drafts are full of it, in the requests that never read it too.
    drafter.alphabet = [token, *range(20)]
    for request, known in zip(requests, expected, strict=True):
        drafter.learn(request, known[0].token_ids)
        assert token not in known[0].token_ids[:-1]
    medusa.collective_rpc(ranks.plant, args=(drafter,))
    damage = torch.full((HIDDEN_SIZE,), torch.nan)
    held = medusa.collective_rpc(ranks.swap_embedding, args=(token, damage))
    assert held[0] is None, "the rank that decides holds it itself"
    found = harness.answers(medusa, requests, params)
    assert (found[2][0].token_ids, found[2][0].finish_reason) == ((), "error")
    assert found[:2] + found[3:] == expected[:2] + expected[3:]
    medusa.collective_rpc(ranks.swap_embedding, args=(token, held[1]))
    assert harness.answers(medusa, requests, params) == expected
    agreed_steps(medusa)


def test_own_heads_whose_sizes_follow_the_cost(plain: Any, medusa: Any, tmp_path: Path) -> None:
    """Costs are measured in step, although the ranks' clocks and cached costs differ."""
    caches = [tmp_path / "first", tmp_path / "second"]
    medusa.collective_rpc(ranks.own_heads, args=(None,))
    [measured, _] = medusa.collective_rpc(ranks.measure_costs, args=(caches,))
    assert min(measured.verify.seconds) > 0
    assert not caches[1].exists(), "a rank that does not decide wrote costs"
    requests = harness.prompts(5, lengths=[3, 17, 40], vocab_size=VOCAB_SIZE, seed=35)
    for params in (PARAMS["greedy"], PARAMS["seeded"]):
        assert harness.answers(medusa, requests, params) == harness.answers(plain, requests, params)
        drafts = [draft for _, step in agreed_steps(medusa) for draft in step]
        assert any(draft is not None for draft in drafts)


@pytest.fixture(scope="module")
def grouped_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like the tiny model, but with a KV head for each rank and tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("grouped") / "model"
    shutil.copytree(tiny_model, directory)
    config = LlamaConfig.from_pretrained(tiny_model)
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    config.tie_word_embeddings = True
    torch.manual_seed(3)
    LlamaForCausalLM(config).float().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def ranked_heads(random_heads: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random heads with a ranking of tokens from both halves of the vocabulary."""
    directory = tmp_path_factory.mktemp("ranked") / "heads"
    shutil.copytree(random_heads, directory)
    ranking = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(4))[:100]
    save_file({"token_ids": ranking.int()}, directory / "draft_vocab.safetensors")
    return directory


@pytest.fixture(scope="module")
def grouped(make_engine: Any, grouped_model: Path, ranked_heads: Path) -> Any:
    engine = make_engine(
        model=str(grouped_model),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        speculative_config={"method": "medusa", "model": str(ranked_heads), "sizes": "fixed"},
    )
    engine.collective_rpc(ranks.disturb)
    engine.collective_rpc(ranks.watch)
    return engine


def test_heads_share_the_whole_language_model_head(
    grouped: Any, medusa: Any, tiny_model: Path, grouped_model: Path, random_heads: Path,
    ranked_heads: Path,
) -> None:  # fmt: skip
    """They are on the rank that drafts alone, and propose what they do in one process."""
    medusa.collective_rpc(ranks.own_heads, args=(None,))
    hidden = torch.randn(5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(6))
    for engine, model, heads, name in (
        (medusa, tiny_model, random_heads, "lm_head.weight"),
        (grouped, grouped_model, ranked_heads, "model.embed_tokens.weight"),
    ):
        assert engine.collective_rpc(ranks.has_heads) == [True, False]
        lm_head = load_file(model / "model.safetensors")[name]
        target = TargetSpec(HIDDEN_SIZE, VOCAB_SIZE, lm_head, torch.float32, torch.device("cpu"))
        known = load_heads(heads, target, draft_vocab_size="auto")
        count = known.max_top_k
        assert count == (VOCAB_SIZE if engine is medusa else 100)
        expected = known.propose(hidden, torch.zeros(5, dtype=torch.int64), count)
        token_ids, log_probs = engine.collective_rpc(ranks.candidates, args=(hidden, count))[0]
        assert torch.equal(token_ids, expected.token_ids)
        torch.testing.assert_close(log_probs, expected.log_probs)


@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_split_kv_heads(make_engine: Any, grouped: Any, grouped_model: Path, name: str) -> None:
    one_process = make_engine(model=str(grouped_model))
    requests = harness.prompts(6, lengths=[3, 17, 40], vocab_size=VOCAB_SIZE, seed=36)
    expected = harness.answers(one_process, requests, PARAMS[name])
    grouped.collective_rpc(ranks.own_heads, args=(None,))
    assert harness.answers(grouped, requests, PARAMS[name]) == expected
    assert any(draft and draft[0] for _, step in agreed_steps(grouped) for draft in step)
    drafter = PlantedDrafter([harness.SHIPPED], VOCAB_SIZE, 0.8)
    for request, known in zip(requests, expected, strict=True):
        drafter.learn(request, known[0].token_ids)
    grouped.collective_rpc(ranks.plant, args=(drafter,))
    assert harness.answers(grouped, requests, PARAMS[name]) == expected
    assert sum(planted(grouped).accepted) > 0
    agreed_steps(grouped)


def test_an_error_on_the_deciding_rank_ends_the_engine(grouped: Any) -> None:
    """The other rank, which waits to be told, must not make it hang. (Last: ends the engine.)"""
    grouped.collective_rpc(ranks.plant, args=(ranks.FailingDrafter(),))
    with pytest.raises(RuntimeError, match="planted failure"):
        harness.answers(grouped, [[1, 2, 3]], PARAMS["greedy"])
