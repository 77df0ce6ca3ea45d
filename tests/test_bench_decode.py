"""What bench_decode.py asks, refuses and concludes, on engines and numbers made up here."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import bench_decode
import pytest
from decode import engines, identity, measure
from decode.identity import Difference, OutputsDifferError, Question, differences, judge
from decode.measure import MemoryShortError, Plan
from decode.prompts import KINDS
from decode.report import markdown, section
from record.markdown import markers
from typer.testing import CliRunner

from medusa_plugin.vllm_glue.offline_engine import (
    Batch,
    BatchCompletion,
    EngineProcessError,
    EngineSettings,
)

HEADS = Path(engines.__file__).parents[2] / "medusa_plugin/assets/smollm2-135m-medusa"
SETUP = engines.Setup(Path("model"), HEADS, False, "bfloat16", 2, max_num_seqs=8)
PLAN = Plan(("a", "b", "c"), (1, 4), (0.0, 0.8), max_tokens=10, repetitions=2)


# What is asked


def test_groups_ask_every_prompt_in_full_batches():
    assert identity.groups(3, 1) == [(0,), (1,), (2,)]
    assert identity.groups(3, 2) == [(0, 1), (2, 0)]
    assert identity.groups(3, 7) == [(0, 1, 2, 0, 1, 2, 0)]


def test_outputs_are_compared_alone_and_in_the_largest_batch_at_every_temperature():
    asked = identity.questions(10, [1, 2, 4], [0.0, 0.8])
    for temperature in (0.0, 0.8):
        mine = [q.numbers for q in asked if q.temperature == temperature]
        assert {n for numbers in mine if len(numbers) == 4 for n in numbers} == set(range(10))
        assert [n for n in mine if len(n) == 1] == [(i,) for i in range(identity.SINGLE_PROMPTS)]
    assert len(identity.questions(10, [1], [0.0])) == 10


def test_requests_of_a_batch_have_different_seeds_and_decode_equally_far():
    sampled = Question((1, 1, 0), 0.8, repetition=1).batch("xy", 7)
    assert [chat[0]["content"] for chat in sampled.conversations] == ["y", "y", "x"]
    assert sampled.ignore_eos and sampled.max_tokens == 7 and sampled.temperature == 0.8
    other = Question((1, 1, 0), 0.8, repetition=2).batch("xy", 7)
    assert len({*sampled.seeds, *other.seeds}) == 6
    assert Question((0,), 0.0).batch("x", 7).seeds is None


def test_built_in_prompts_differ_and_texts_to_edit_come_with_the_text():
    for prompts in KINDS.values():
        assert len(set(prompts)) == len(prompts) >= 8
    assert all("\n\n" in prompt for prompt in KINDS["edit"])


# Refusal


def found(engine: str, temperature: float, ours=(1, 2, 3), batch=(0, 1)) -> list[Difference]:
    asked = [Question((0,), 0.0), Question(batch, temperature)]
    expected = [((5, 6),), ((1, 2, 3), (7, 8, 9))]
    return differences(engine, asked, expected, [((5, 6),), ((1, 2, 3), ours)])


def test_other_tokens_of_ours_are_refused_with_the_place():
    with pytest.raises(OutputsDifferError) as error:
        judge(found("static-5", 0.8, (7, 8, 4)), ours=True)
    assert str(error.value) == (
        "static-5 differs from plain in float32 on prompt 2 at batch 2, temperature 0.8: token 3 "
        "of its answer is 4, expected 9"
    )


@pytest.mark.parametrize("answer", [(7, 8), (7, 8, 9, 1), ()])
def test_a_shorter_or_longer_answer_is_another_one(answer):
    (difference,) = found("ours", 0.0, answer)
    assert difference.position == min(len(answer), 3)


def test_a_rival_that_differs_is_noted_and_measured():
    assert "token 1 of its answer is 0, expected 7" in judge(found("ngram", 0.0, (0,)), False)
    assert "other draws" in judge(found("ngram", 0.8, (0,)), False)
    assert judge(found("ngram", 0.8, (7, 8, 9)), False) == "identical"
    assert judge(found("ours", 0.8, (7, 8, 9)), True) == "identical"


# Engines made up here


class FakeEngine:
    """Answers with tokens that its settings name; fails where they say so."""

    asked: list[tuple[str, Batch]] = []  # noqa: RUF012 (reset by the fixture)
    resident_bytes = 1 << 30

    def __init__(self, settings: EngineSettings):
        self.name = settings.options.get("name", "plain")
        self.token = settings.options.get("token", 1)
        self.closed = False

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        self.closed = True

    def wait_until_ready(self):
        if self.token is None:
            raise EngineProcessError("the engine failed: no such thing\nlog line")

    def generate_batch(self, batch: Batch) -> BatchCompletion:
        self.asked.append((self.name, batch))
        count = len(batch.conversations)
        return BatchCompletion(
            token_ids=((self.token,) * batch.max_tokens,) * count,
            texts=("",) * count,
            request_steps=(batch.max_tokens // 2,) * count,
            seconds=2.0 if self.name == "plain" else 1.0,
            steps=batch.max_tokens // 2,
            drafted=0,
            accepted=0,
            stages=({"step": 2.0, "target forward": 1.0},) if batch.time_stages else (),
        )


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(measure, "OfflineEngine", FakeEngine)
    monkeypatch.setattr(measure, "available_bytes", lambda: 64 << 30)
    monkeypatch.setattr(FakeEngine, "asked", [])


def taker(name: str, token: int | None = 1, ours: bool = False) -> engines.Contender:
    return engines.Contender(name, {"name": name, "token": token}, ours)


def test_every_engine_is_compared_in_eager_float32(fake, monkeypatch):
    settings = []
    monkeypatch.setattr(
        measure, "OfflineEngine", lambda made: settings.append(made.options) or FakeEngine(made)
    )
    takers = [taker("plain"), taker("ngram", 2), taker("ours", 1, True)]
    verdicts = measure.compare_outputs(takers, {}, SETUP, PLAN, lambda _: None)
    assert all(o["dtype"] == "float32" and o["enforce_eager"] for o in settings)
    assert verdicts["ours"] == "identical" and "expected 1" in verdicts["ngram"]
    takers[2] = taker("ours", 2, True)
    with pytest.raises(OutputsDifferError, match="ours differs"):
        measure.compare_outputs(takers, {}, SETUP, PLAN, lambda _: None)


def test_a_rival_that_does_not_start_is_left_out_and_others_are_errors(fake):
    missing: dict[str, str] = {}
    takers = [taker("plain"), taker("suffix", None), taker("ours", 1, True)]
    verdicts = measure.compare_outputs(takers, missing, SETUP, PLAN, lambda _: None)
    assert missing == {"suffix": "the engine failed: no such thing"} and set(verdicts) == {"ours"}
    with ExitStack() as stack:
        assert list(measure.start(stack, takers, missing, SETUP, print)) == ["plain", "ours"]
        late: dict[str, str] = {}
        assert list(measure.start(stack, takers, late, SETUP, print)) == ["plain", "ours"]
        assert late == missing
    for name in ("plain", "ours"):
        broken = [taker(t.name, None if t.name == name else 1, t.ours) for t in takers]
        with pytest.raises(EngineProcessError, match=f"{name}: the engine failed"):
            measure.compare_outputs(broken, {}, SETUP, PLAN, lambda _: None)


def test_engines_take_turns_and_each_goes_first_equally_often(fake):
    made = {name: FakeEngine(taker(name).settings(SETUP)) for name in ("plain", "ours", "ngram")}
    advances: list[None] = []
    plan = replace(PLAN, batches=(1,), temperatures=(0.0,), repetitions=3)
    ((batch, runs, stages),) = measure.measure(made, plan, lambda: advances.append(None))
    timed = [name for name, batch in FakeEngine.asked if batch.max_tokens == plan.max_tokens]
    timed = timed[: 3 * 2 * 3]
    rounds = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert all(sorted(names) == ["ngram", "ours", "plain"] for names in rounds)
    assert sorted(names[0] for names in rounds) == ["ngram"] * 2 + ["ours"] * 2 + ["plain"] * 2
    assert batch == 1 and len(advances) == plan.num_requests(3) == len(FakeEngine.asked)
    assert [(r.engine, r.repetition) for r in runs[:3]] == [("plain", 0), ("ours", 0), ("ngram", 0)]
    assert runs[0].tokens == 40 and runs[0].seconds == 4.0
    assert {times.engine: times.overhead_fraction for times in stages} == dict.fromkeys(made, 0.5)


def test_engines_that_do_not_fit_are_refused_before_the_machine_swaps():
    measure.require_memory(0, 1 << 40, 0)
    measure.require_memory(2, 1 << 30, 3 << 30)
    with pytest.raises(MemoryShortError, match=r"2 more engines of 2.0 GiB need 5.0 GiB"):
        measure.require_memory(2, 2 << 30, 4 << 30)
    assert measure.available_bytes() > 0


# The command line


def invoke(tmp_path: Path, *arguments: str):
    return CliRunner().invoke(
        bench_decode.app, ["--out", str(tmp_path / "out"), "--model", str(tmp_path), *arguments]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "1,x"], "--batches 1,x: expected different numbers from 1"),
        (["--batches", "0"], "expected different numbers from 1"),
        (["--batches", "2,2"], "expected different numbers"),
        (["--temperatures", "-1"], "expected different numbers from 0"),
        (["--static-sizes", "64"], "--static-sizes 64: a tree has 1 to 63 nodes"),
        (["--variant", "x"], "expected NAME=JSON"),
        (["--variant", "x=[1]"], "expected NAME=JSON"),
        (["--variant", "x={"], "--variant x={"),
        (["--variant", "ours={}"], "two engines are called 'ours'"),
        (["--engines", "eagle"], "no engine 'eagle': there are plain, chain, ngram, suffix, ours"),
        (["--into", __file__], "--into goes with --markdown"),
    ],
)
def test_mistakes_are_named_before_an_engine_starts(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(bench_decode, "compare_outputs", lambda *_: pytest.fail("started"))
    done = invoke(tmp_path, *arguments)
    text = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and message in text
    assert isinstance(done.exception, SystemExit), "a traceback"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OutputsDifferError("ours differs here"), 2, "No numbers: ours differs here"),
        (EngineProcessError("the engine failed"), 1, "the engine failed"),
        (MemoryShortError("2 more engines"), 1, "2 more engines"),
    ],
)
def test_failures_are_words_and_leave_no_old_numbers(tmp_path, monkeypatch, error, code, message):
    def fail(*_):
        raise error

    monkeypatch.setattr(bench_decode, "compare_outputs", fail)
    (tmp_path / "out").mkdir()
    old = tmp_path / "out" / "results.json"
    old.write_text("{}")
    done = invoke(tmp_path, "--engines", "ours")
    assert done.exit_code == code and message in done.output
    assert not old.exists()


def test_a_cut_run_keeps_what_was_measured_and_says_what_is_left(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(
        bench_decode,
        "contenders",
        lambda *_: ([taker("plain"), taker("ours", 1, True)], {"suffix": "not installed"}),
    )
    whole = measure.measure

    def cut(*arguments):
        yield next(whole(*arguments))
        raise EngineProcessError("killed")

    monkeypatch.setattr(bench_decode, "measure", cut)
    done = invoke(tmp_path, "--batches", "1,2,4", "--repetitions", "2")
    assert done.exit_code == 1 and "killed" in done.output
    out = tmp_path / "out"
    written = json.loads((out / "results.json").read_text())
    assert written["unfinished"] == "2, 4" and written["kind"] == "chat"
    assert written["summary"]["speedup_by_batch"] == {"1": 2.0}
    assert written["outputs"] == {"ours": "identical"} and written["git_sha"]
    assert (out / "speedup.png").read_bytes().startswith(b"\x89PNG")
    assert len(written["runs"]) == 2 * 2 * 2

    text = markdown(written)
    assert "Unfinished: batch 2, 4 was not measured." in text
    assert "| `vs_suffix` | none: not installed |" in text
    assert "| vLLM's suffix | took no part: not installed |" in text
    assert "| 1 | 2.00 (2.00 to 2.00) |" in text
    assert "| overhead | 50.0 % | 50.0 % |" in text

    document = tmp_path / "doc.md"
    begin, end = markers(section(written))
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    arguments = ["--markdown", str(out / "results.json"), "--into", str(document)]
    assert CliRunner().invoke(bench_decode.app, arguments).exit_code == 0
    assert document.read_text() == f"before\n{begin}\n{text}\n{end}\nafter\n"
    document.write_text("no markers")
    failed = CliRunner().invoke(bench_decode.app, arguments)
    assert failed.exit_code == 2 and "bench_decode_chat:begin" in failed.output


def test_a_child_of_the_command_has_not_read_the_number_of_threads_before_it_is_set():
    code = "import bench_decode, sys; assert not {'torch', 'vllm'} & set(sys.modules)"
    folder = Path(bench_decode.__file__).parent
    path = f"{folder}:{folder.parent}"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path})
