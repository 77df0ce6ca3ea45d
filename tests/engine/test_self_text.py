"""Text that a model makes, with the hidden states that its tokens were chosen from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_plugin.training.hidden_states import extract
from medusa_plugin.training.self_text import Made, SelfTextFile, Skipped
from medusa_plugin.training.target import Target
from medusa_plugin.training.texts import self_made_texts
from medusa_plugin.vllm_glue.self_text import SelfTextRequest, make_self_text
from tests.engine.conftest import engine_maker
from tests.training import models

PROMPTS = tuple(f"Tell me of {thing} " * (1 + i) for i, thing in enumerate("abcdefgh"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_llama(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def make_engine(model: Path) -> Iterator[Any]:
    with engine_maker(model) as make:
        yield make


ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    # Prompts of up to 120 tokens, read in parts beside answers.
    "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 4},
    # Room for three requests or so at their longest: others are thrown out and go on later.
    "preempted": {"num_gpu_blocks_override": 16, "enable_prefix_caching": False},
}


@pytest.mark.parametrize(
    ("kind", "temperature"),
    # Plain vLLM ends on a CPU where a seeded request's prompt is read in parts.
    [("roomy", 0.0), ("roomy", 1.0), ("chunked", 0.0), ("preempted", 0.0), ("preempted", 1.0)],
)
def test_kept_states_are_those_of_a_forward_pass(
    kind: str, temperature: float, make_engine: Any, model: Path, tmp_path: Path
) -> None:
    engine = make_engine(**ENGINES[kind])
    file = SelfTextFile(tmp_path / "text.jsonl")
    preempted = count_preemptions(engine)
    request = SelfTextRequest(frozenset(), 10**6, 100, temperature, 0, PROMPTS)
    made = make_self_text(engine, request, file.append)
    assert bool(preempted) == (kind == "preempted")
    texts = self_made_texts([file])
    assert sum(text.rows for text in texts) == made > 100
    assert max(text.rows for text in texts) > 50, "no answer is long enough to show anything"

    target = Target(str(model), torch.float32, torch.device("cpu"))
    for text in texts:
        assert text.hidden is not None
        (wanted,) = target.hidden_states([text])
        torch.testing.assert_close(text.hidden.read().float(), wanted, rtol=1e-2, atol=1e-2)
    target.hidden_states = no_forward_pass  # type: ignore[method-assign]
    shards = extract(target, texts, tmp_path / "shards")
    stored = torch.cat([shard.read()[0] for shard in shards])
    assert torch.equal(stored, torch.cat([text.hidden.read() for text in texts if text.hidden]))


def no_forward_pass(texts: Any) -> Any:
    raise AssertionError("computed again")


def count_preemptions(engine: Any) -> list[str]:
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    preempted, preempt = [], scheduler._preempt_request

    def note(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = note
    return preempted


def test_prompts_that_the_model_makes_up_are_answered_until_there_is_enough(
    make_engine: Any, tmp_path: Path
) -> None:
    file = SelfTextFile(tmp_path / "text.jsonl")
    items: list[Made | Skipped] = []
    engine = make_engine()

    def report(item: Made | Skipped) -> None:
        items.append(item)
        file.append(item)

    made = make_self_text(engine, SelfTextRequest(frozenset(), 300, 60, 0.0, 0), report)
    conversations = [item.conversation for item in items if isinstance(item, Made)]
    assert made >= 300
    assert sum(len(item.answer_ids) for item in conversations) >= 300
    assert not engine.llm_engine.has_unfinished_requests()

    done = frozenset(item.index for item in file)
    make_self_text(engine, SelfTextRequest(done, 100, 60, 0.0, 0), report)
    indices = [item.conversation.index if isinstance(item, Made) else item.index for item in items]
    assert len(set(indices)) == len(indices), "an index was done twice"
    assert all(text.hidden is not None for text in self_made_texts([file]))


def made_of(index: int, rows: int) -> Made:
    from medusa_plugin.training.self_text import Conversation

    states = torch.full((rows, 4), float(index), dtype=torch.bfloat16).view(torch.int16).numpy()
    prompt_ids, answer_ids = (1, 2), tuple(range(rows))
    return Made(Conversation(index, f"prompt {index}", prompt_ids, answer_ids), states)


def test_what_a_kill_tore_is_dropped_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    file = SelfTextFile(path)
    for index in range(3):
        file.append(made_of(index, 9 + index))
    whole, states = path.read_bytes(), path.with_suffix(".hidden").read_bytes()
    # Killed while the states, or the line, of the last conversation were written.
    for lines, kept in ((whole, states + b"torn"), (whole[:-7], states)):
        path.write_bytes(lines)
        path.with_suffix(".hidden").write_bytes(kept)
        again = SelfTextFile(path)
        again.append(made_of(7, 10))
        texts = self_made_texts([again])
        for text, index in zip(texts, (0, 1, 2, 7) if lines is whole else (0, 1, 7), strict=True):
            assert text.hidden is not None
            found = text.hidden.read()
            assert found.shape == (text.rows, 4) and bool((found == index).all())
    # States that were lost are computed again.
    path.with_suffix(".hidden").unlink()
    assert [text.hidden for text in self_made_texts([SelfTextFile(path)])] == [None] * 3
