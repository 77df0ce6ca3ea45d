"""Random requests arriving and leaving at random, all parameters mixed: equal to plain vLLM."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.engine import harness
from tests.engine.conftest import EOS_TOKEN_ID, VOCAB_SIZE

NUM_REQUESTS = 40
CONFIGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 40, "max_num_seqs": 4},
    "preempting": {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 128},
    "big-blocks": {"block_size": 128, "enable_prefix_caching": False},
}


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes, and after how many further steps it is aborted, if at all."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    step: int
    abort_after: int | None
    options: dict[str, Any] | None
    """What it asks of Medusa: its text stays the same."""


def random_params(pick: random.Random) -> SamplingParams:
    def chance(probability: float) -> bool:
        return pick.random() < probability

    options: dict[str, Any] = {
        "temperature": pick.choice([0.0, 0.0, 0.6, 1.0]),
        "max_tokens": pick.choice([1, 2, 3, 5, 17, 40]),
        "ignore_eos": chance(0.3),
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    if options["temperature"]:
        options["seed"] = pick.randrange(10**6)
        options |= pick.choice([{}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.05}])
    for probability, extra in (
        (0.2, {"repetition_penalty": 1.3}),
        (0.2, {"presence_penalty": 0.8, "frequency_penalty": 0.5}),
        (0.3, {"logprobs": pick.choice([0, 1, 3])}),
        (0.2, {"min_tokens": min(options["max_tokens"], pick.choice([1, 4, 9]))}),
        (0.2, {"logit_bias": {5: 2.0, EOS_TOKEN_ID: 8.0}}),
        (0.2, {"stop_token_ids": [7, 9, 33]}),
        (0.2, {"stop": ["a", "x"], "include_stop_str_in_output": chance(0.5)}),
    ):
        if chance(probability):
            options |= extra
    options |= pick.choice(
        [
            {}, {}, {},
            {"bad_words": ["a", "bc"]},
            {"allowed_token_ids": [*range(40), EOS_TOKEN_ID]},
            {"structured_outputs": StructuredOutputsParams(regex="[a-c]{3,40}")},
        ]
    )  # fmt: skip
    return SamplingParams(**options)


def random_arrivals(pick: random.Random) -> list[Arrival]:
    shared = [pick.randrange(VOCAB_SIZE) for _ in range(128)]
    arrivals, step = [], 0
    for i in range(NUM_REQUESTS):
        length = pick.choice([1, 2, 17, 31, 32, 33, 64, 65, 97, 120])
        fresh = [pick.randrange(VOCAB_SIZE) for _ in range(length)]
        step += pick.choice([0, 0, 1, 2, 4])
        arrivals.append(
            Arrival(
                request_id=f"request-{i}",
                prompt=pick.choice([shared[:length], fresh]),
                params=random_params(pick),
                step=step,
                abort_after=pick.randint(1, 8) if pick.random() < 0.15 else None,
                options=pick.choice(
                    [None, None, {"enabled": False}, {"max_nodes": pick.randint(1, 9)}]
                ),
            )
        )
    return arrivals


def run(llm: Any, arrivals: list[Arrival], medusa: bool) -> dict[str, Any]:
    """Final outputs by request id; aborted requests, which only Medusa gets, are left out."""
    engine = llm.llm_engine
    waiting, outputs, step = list(arrivals), {}, 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0].step <= step:
            new = waiting.pop(0)
            params = new.params.clone()
            if medusa and new.options is not None:
                params.extra_args = {"medusa": new.options}
            engine.add_request(new.request_id, {"prompt_token_ids": list(new.prompt)}, params)
        for arrival in arrivals:
            due = medusa and arrival.abort_after is not None
            if due and step == arrival.step + arrival.abort_after:
                engine.abort_request([arrival.request_id])
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                outputs[output.request_id] = output.outputs[0]
        step += 1
    return outputs


def assert_equal(found: dict[str, Any], expected: dict[str, Any], arrivals: list[Arrival]) -> None:
    """What `run` found with Medusa is what it expected without, for all that ran to their end."""
    assert {a.request_id for a in arrivals if a.abort_after is None} <= set(found)
    for request_id, ours in found.items():
        theirs = expected[request_id]
        assert ours.token_ids == theirs.token_ids, request_id
        assert (ours.text, ours.finish_reason, ours.stop_reason) == (
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
        )
        for mine, known in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert mine.keys() == known.keys()
            for token, value in known.items():
                assert mine[token].logprob == pytest.approx(value.logprob, abs=1e-4, rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CONFIGS)
def test_random_traffic(make_engine: Any, random_heads: Path, name: str, seed: int) -> None:
    pick = random.Random(1000 * seed + 7)
    arrivals = random_arrivals(pick)
    # Plain vLLM cannot prefill a seeded request in chunks on CPU: it answers in a roomy engine.
    expected = run(make_engine(), arrivals, medusa=False)
    assert len(expected) == NUM_REQUESTS
    medusa = make_engine(
        speculative_config=harness.speculation(random_heads),
        **CONFIGS[name],
    )
    drafter = harness.plant(medusa, harness.random_trees(pick, 8), VOCAB_SIZE, 0.8, seed)
    for arrival in arrivals:
        drafter.learn(arrival.prompt, expected[arrival.request_id].token_ids)
    found = run(medusa, arrivals, medusa=True)
    assert_equal(found, expected, arrivals)
    assert sum(drafter.accepted) > 20
    assert drafter.branching_steps > 20
    runner = harness.runner_of(medusa)
    assert set(runner._proposed) <= set(runner.requests), "trees of ended requests are kept"
    assert set(runner._running._settings) <= set(runner.requests)
