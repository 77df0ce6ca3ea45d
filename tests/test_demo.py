"""The demo's arithmetic, its table, its command line, and its child processes' failures."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from medusa_plugin import __version__
from medusa_plugin.commands import demo
from medusa_plugin.commands.main import app
from medusa_plugin.vllm_glue.offline_engine import (
    Completion,
    EngineProcessError,
    EngineSettings,
    OfflineEngine,
)


def completion(tokens: int, seconds: float, steps: int, nodes: int = 0) -> Completion:
    return Completion(tuple(range(tokens)), "text", seconds, steps, nodes)


TURNS = [
    demo.Turn("q1", [completion(11, 2.0, 11), completion(11, 1.0, 11)],
              [completion(11, 1.0, 6, 75), completion(11, 1.0, 6, 75)]),
    demo.Turn("q2", [completion(21, 2.0, 21), completion(21, 3.0, 21)],
              [completion(21, 1.0, 11, 150), completion(21, 1.0, 11, 150)]),
]  # fmt: skip


def test_summary() -> None:
    result = demo.summarise(TURNS, identical=True)
    # Both repetitions of plain take 4 s for 32 tokens; medusa's take 2 s.
    assert result["plain_tokens_per_second"] == 8.0
    assert result["medusa_tokens_per_second"] == 16.0
    assert result["speedup"] == 2.0
    assert result["tokens_per_step"] == 2.0  # 30 decode tokens in 15 decode steps
    assert result["nodes_verified"] == 225
    assert result["identical_float32"] is True


@pytest.mark.parametrize(("identical", "word"), [(True, "yes"), (False, "no")])
def test_table(identical: bool, word: str) -> None:
    result = demo.summarise(TURNS, identical)
    result |= {"dtype": "bfloat16", "mode": "eager", "hardware": {"cpu": "X", "cores": 2}}
    screen = io.StringIO()
    Console(file=screen, width=80).print(demo.table(result))
    assert "2.00 x" in screen.getvalue()
    assert word in screen.getvalue()


def test_tokens_per_step_of_an_answer_of_one_token() -> None:
    assert completion(1, 1.0, 1).tokens_per_step == 1.0


def test_help_has_examples_and_version() -> None:
    runner = CliRunner()
    assert "medusa demo --mode eager" in runner.invoke(app, ["demo", "--help"]).output
    assert __version__ in runner.invoke(app, ["--version"]).output


def test_bad_prompts_file_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    result = CliRunner().invoke(app, ["demo", "--prompts", str(path)])
    assert result.exit_code == 1
    assert "has no prompts" in " ".join(result.output.split())  # the console wraps lines
    assert CliRunner().invoke(app, ["demo", "--prompts", "/nowhere"]).exit_code == 2


def test_a_failing_engine_shows_its_error(tmp_path: Path) -> None:
    engine = OfflineEngine(EngineSettings({"model": str(tmp_path)}))
    with engine, pytest.raises(EngineProcessError, match="engine failed"):
        engine.wait_until_ready()
    assert not engine._log.exists()


def test_a_killed_engine_is_noticed(tmp_path: Path) -> None:
    with OfflineEngine(EngineSettings({"model": str(tmp_path)})) as engine:
        engine._process.kill()
        with pytest.raises(EngineProcessError, match="exit code -9"):
            engine.wait_until_ready()


def test_an_engine_killed_between_questions_is_noticed(tmp_path: Path) -> None:
    with OfflineEngine(EngineSettings({"model": str(tmp_path)})) as engine:
        engine._process.kill()
        engine._process.join()  # now the pipe refuses the question itself
        with pytest.raises(EngineProcessError, match="exit code -9"):
            engine.ask([{"role": "user", "content": "Hello"}], 4)


@pytest.mark.parametrize("name", ["", "file/result.json"])
def test_json_that_cannot_be_written_fails_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(demo, "_timed_part", lambda *_: pytest.fail("started the engines"))
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["demo", "--json", str(tmp_path / name)])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit), "a traceback"
    assert "irectory" in result.output
