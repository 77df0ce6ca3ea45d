"""Batches through the engine process, and vLLM's own chain on our heads beside ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from decode.engines import CHAIN, OURS, Setup, contenders, ours, parse_variant
from typer.testing import CliRunner

from medusa_plugin.commands.demo import QUESTIONS
from medusa_plugin.commands.main import app
from medusa_plugin.embedded import embedded_heads_path, ensure_embedded_model
from medusa_plugin.vllm_glue.offline_engine import Batch, OfflineEngine
from medusa_plugin.vllm_glue.stage_clock import TARGET_STAGES

CHATS = tuple(({"role": "user", "content": question},) for (question,) in QUESTIONS[:2])
TOKENS = 24
GREEDY = Batch(CHATS, TOKENS, ignore_eos=True)


def setup(heads: Path) -> Setup:
    model = ensure_embedded_model(progress=False)
    return Setup(model, heads, True, "float32", 1, max_num_seqs=4)


@pytest.fixture(scope="module")
def embedded() -> Iterator[OfflineEngine]:
    """Ours with the embedded heads, which read the drafted tokens."""
    heads = embedded_heads_path()
    with OfflineEngine(ours(OURS, heads, {"sizes": "fixed"}).settings(setup(heads))) as engine:
        engine.wait_until_ready()
        yield engine


@pytest.fixture(scope="module")
def plain_heads(embedded: OfflineEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of the kind that vLLM's chain can run, which know the answers to `CHATS`."""
    folder = tmp_path_factory.mktemp("plain-heads")
    answers = embedded.generate_batch(GREEDY).texts
    with (folder / "chats.jsonl").open("w") as file:
        for i in range(12):  # two are held out
            asked = f"{CHATS[i % 2][0]['content']}{' ' * (i // 2)}"
            turns = [("user", asked), ("assistant", answers[i % 2])]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    arguments = ["train", str(ensure_embedded_model(progress=False)), "--kind", "medusa"]
    arguments += ["--conversations", str(folder / "chats.jsonl"), "--out", str(folder / "heads")]
    arguments += ["--epochs", "40", "--batch-size", "256", "--device", "cpu", "--dtype", "float32"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return folder / "heads"


@pytest.fixture(scope="module")
def engine(plain_heads: Path) -> Iterator[OfflineEngine]:
    """Ours with a chain as tree: what vLLM's chain of the same heads is compared with."""
    chain = 'chain={"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "sizes": "fixed"}'
    settings = parse_variant(chain, plain_heads).settings(setup(plain_heads))
    with OfflineEngine(settings) as engine:
        engine.wait_until_ready()
        yield engine


def test_a_batch_answers_as_single_questions_do(engine: OfflineEngine) -> None:
    together = engine.generate_batch(GREEDY)
    assert [len(tokens) for tokens in together.token_ids] == [TOKENS, TOKENS]
    pieces: list[str] = []
    for i, chat in enumerate(CHATS):
        pieces.clear()
        alone = engine.ask(chat, TOKENS, pieces.append)
        assert alone.token_ids == together.token_ids[i]
        assert "".join(pieces) == alone.text == together.texts[i]
    assert together.steps >= max(together.request_steps)
    assert 0 < together.accepted < together.drafted
    assert engine.resident_bytes > 2**29  # the model alone, in float32


def test_only_so_many_requests_are_in_flight(engine: OfflineEngine) -> None:
    together = engine.generate_batch(GREEDY)
    one_by_one = engine.generate_batch(replace(GREEDY, in_flight=1))
    assert one_by_one.token_ids == together.token_ids
    assert one_by_one.steps >= sum(one_by_one.request_steps) > together.steps
    more_than_there_are = engine.generate_batch(replace(GREEDY, in_flight=9))
    assert more_than_there_are.steps == together.steps


def test_seeds_decide_a_sample(engine: OfflineEngine) -> None:
    chats = (CHATS[0], CHATS[0], CHATS[0])
    batch = Batch(chats, TOKENS, temperature=0.8, seeds=(1, 2, 1), ignore_eos=True)
    first, second, third = engine.generate_batch(batch).token_ids
    assert first == third != second


@pytest.mark.parametrize("name", ["engine", "embedded"])
def test_stages_are_timed_where_asked_for_and_add_up(
    name: str, request: pytest.FixtureRequest
) -> None:
    engine: OfflineEngine = request.getfixturevalue(name)
    batch = Batch(CHATS, TOKENS, ignore_eos=True, time_stages=True)
    answer = engine.generate_batch(batch)
    assert 0 < len(answer.stages) < answer.steps  # without the prefill
    for times in answer.stages:
        assert {*TARGET_STAGES, "accept", "heads", "draft", "schedule"} <= set(times)
        assert sum(times.values()) <= 2 * times["step"]
    assert engine.generate_batch(GREEDY).stages == ()


def test_vllms_own_chain_drafts_what_our_chain_drafts(
    engine: OfflineEngine, plain_heads: Path, tmp_path: Path
) -> None:
    takers, missing = contenders([CHAIN, OURS], [], setup(plain_heads), tmp_path)
    assert not missing
    (chain,) = (taker for taker in takers if taker.name == CHAIN)
    with OfflineEngine(chain.settings(setup(plain_heads))) as theirs:
        theirs.wait_until_ready()
        expected = theirs.generate_batch(GREEDY)
    found = engine.generate_batch(GREEDY)
    assert found.token_ids == expected.token_ids
    assert found.request_steps == expected.request_steps
    assert found.accepted == expected.accepted > 0
