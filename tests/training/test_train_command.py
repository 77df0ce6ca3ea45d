"""`medusa train` from text on disk to served files, killed at each stage on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from medusa_plugin.commands.main import app
from medusa_plugin.heads import load_heads, peek_heads
from medusa_plugin.training.pipeline import Plan, require_same_text
from medusa_plugin.training.target import Target
from medusa_plugin.training.texts import TrainingError
from tests.training import models

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with file.open("w") as out:
        for i in range(60):
            turns = [
                {"role": "user", "content": f"Count from {i}"},
                {"role": "assistant", "content": " ".join(str(i + j) for j in range(20))},
                {"role": "user", "content": "Again"},
                {"role": "assistant", "content": " ".join(str(i + j) for j in range(12))},
            ]
            out.write(json.dumps({"messages": turns}) + "\n")
    return file


def arguments(model: Path, chats: Path, out: Path, kind: str, epochs: int = 3) -> list[str]:
    sizes = ["--width", "48", "--output-rank", "16", "--draft-vocab-size", "100"]
    rest = ["--conversations", str(chats), "--epochs", str(epochs), "--batch-size", "64"]
    dtype = ["--dtype", "float32", "--device", "cpu", "--num-heads", "3"]
    return ["train", str(model), "--out", str(out), "--kind", kind, *sizes, *rest, *dtype]


@pytest.mark.parametrize("kind", ["medusa", "conditioned", "recurrent"])
def test_files_of_every_kind_load_and_the_report_is_whole(
    kind: str, model: Path, chats: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, arguments(model, chats, tmp_path, kind))
    assert result.exit_code == 0, result.output
    spec = Target(str(model), torch.float32, torch.device("cpu")).spec()
    heads = load_heads(tmp_path, spec, draft_vocab_size=100)
    assert (heads.num_heads, heads.max_top_k) == (3, 100)
    tuning = peek_heads(tmp_path).tuning
    assert tuning is not None and len(tuning.calibration) == 3 and tuning.draft_vocab_size == 100
    for file in tmp_path.glob("*.*"):
        assert file.stat().st_mode & 0o444 == 0o444, f"{file.name} is not for all to read"
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and "http" not in page
    for name in ("loss.png", "accuracy.png", "tokens_per_step.png"):
        assert (tmp_path / name).stat().st_size > 1000
    card = (tmp_path / "README.md").read_text()
    for text in (card, page):
        assert str(tmp_path) not in text and str(model) not in text, "a directory of this machine"
    for fact in ("| seed | 0 |", "chats.jsonl", "torch ", "--conversations", kind):
        assert fact in card or fact == "--conversations"
    state = json.loads((tmp_path / "training.json").read_text())
    assert state["evaluations"] and state["step"] > 10


def test_killed_again_and_again_it_ends_with_the_same_heads(
    model: Path, chats: Path, tmp_path: Path
) -> None:
    """Kill -9 as soon as it trains, and as soon as it judges; shards have a test of their own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "medusa_plugin.commands.main"]
    again = [*command, *arguments(model, chats, tmp_path / "killed", "recurrent", 12)]
    out = tmp_path / "killed"
    marks = [out / "work/fit.pt", out / "heads.safetensors"]
    for mark in marks:
        process = subprocess.Popen(
            again, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while not mark.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        assert mark.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run(again, env=environment, cwd=ROOT).returncode == 0
    whole = arguments(model, chats, tmp_path / "whole", "recurrent", 12)
    assert CliRunner().invoke(app, whole).exit_code == 0
    name = "heads.safetensors"
    assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "{chats}", "--conversations", "{chats}"], "not both"),
        (["--device", "cuda"], "no CUDA device"),
        (["--device", "abacus"], "no device"),
        (["--kind", "eagle"], "eagle"),
    ],
)
def test_bad_options_are_named(
    options: list[str], message: str, model: Path, chats: Path, tmp_path: Path
) -> None:
    filled = [option.format(chats=chats) for option in options]
    result = CliRunner().invoke(app, ["train", str(model), "--out", str(tmp_path), *filled])
    assert result.exit_code == 2
    assert message in result.output


def test_too_few_conversations_are_refused(model: Path, chats: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(chats.read_text().splitlines(keepends=True)[:2]))
    result = CliRunner().invoke(app, arguments(model, few, tmp_path / "out", "conditioned"))
    assert result.exit_code == 1
    assert "at least 3" in " ".join(result.output.split())


def test_text_made_in_another_way_is_refused(tmp_path: Path) -> None:
    from medusa_plugin.training.fit import FitOptions
    from medusa_plugin.training.setup import Shape

    plan = Plan("m", tmp_path, Shape(), FitOptions())
    require_same_text(plan, {"temperature": 0.0})
    require_same_text(plan, {"temperature": 0.0})
    with pytest.raises(TrainingError, match="another way"):
        require_same_text(plan, {"temperature": 0.5})
