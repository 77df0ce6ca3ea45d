"""`medusa tune` from the command line to the file that the next engine reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medusa_plugin.commands.main import app
from medusa_plugin.heads import peek_heads
from tests.engine.conftest import NUM_HEADS

PROMPTS = "\n".join(f"Tell me about {thing}." for thing in ("ships", "bread", "the moon", "ants"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text(PROMPTS)
    return file


def test_a_run_leaves_a_tuning_that_engines_read(
    tiny_model: Path, random_heads: Path, prompts: Path, tmp_path: Path
) -> None:
    heads, figures = tmp_path / "heads", tmp_path / "json" / "figures.json"
    shutil.copytree(random_heads, heads)
    arguments = ["tune", str(tiny_model), "--heads", str(heads), "--prompts", str(prompts)]
    arguments += ["--mode", "eager", "--max-tokens", "40", "--num-speculative-tokens", "6"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(figures)])
    assert result.exit_code == 0, result.output
    assert "Calibration" in result.output and "Tokens/s by batch" in result.output

    tuning = peek_heads(heads).tuning
    assert tuning is not None
    assert len(tuning.calibration) == len(tuning.accuracies) == NUM_HEADS
    assert tuning.measured_on.model == tiny_model.name, "no path of this machine in the file"
    # A random model's answers may loop at once; those do not count.
    assert 2 <= tuning.measured_on.num_prompts <= 4 and tuning.measured_on.num_tokens > 32
    written = json.loads(figures.read_text())
    assert written["tuning"] == json.loads(tuning.model_dump_json())
    for figure in ("expected", "simulated"):
        by_size = written["tokens_per_step"][figure]
        assert len(by_size) == 7 and by_size[0] == 1 and min(by_size) >= 1
    assert written["heads"][0]["judged"] > 0, "the first head's turn always comes"
    assert (heads / "tuning.png").stat().st_size > 0


def test_a_prompt_without_room_for_an_answer_is_named_before_any_is_answered(
    tiny_model: Path, random_heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("long.txt").write_text("Short.\n\n" + "x" * 511 + "\n" + "y" * 512 + "\nShort.\n")
    arguments = ["tune", str(tiny_model), "--heads", str(random_heads), "--prompts", "long.txt"]
    result = CliRunner().invoke(app, [*arguments, "--mode", "eager", "--out", "o"])
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "long.txt, line 4: the prompt has 512 tokens" in said and "context holds 512" in said
    assert "Answering prompts" not in said


def test_too_little_to_learn_from_is_said(
    tiny_model: Path, random_heads: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "one.txt"
    prompts.write_text("Only this.\n")
    arguments = ["tune", str(tiny_model), "--heads", str(random_heads), "--prompts", str(prompts)]
    result = CliRunner().invoke(app, [*arguments, "--mode", "eager", "--out", str(tmp_path / "o")])
    assert result.exit_code == 1
    assert "give more prompts" in result.output
    assert not list((tmp_path / "o").iterdir())
