"""What `medusa tune` decides without an engine: what it starts, learns, and refuses to begin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from medusa_plugin.commands import tune
from medusa_plugin.commands.demo import Mode
from medusa_plugin.commands.main import app
from medusa_plugin.heads.tuning import HeadsTuning
from medusa_plugin.training.record import Answer
from medusa_plugin.training.tree_sizes import Yield
from medusa_plugin.tree.budget import CostCurve, StepCosts
from medusa_plugin.vllm_glue.recording import EngineFacts, Recording

OPTIONS = tune.Options("org/model", None, 8, 40, Mode.EAGER, "auto", None, "auto")
NUM_HEADS, NUM_NODES = 2, 4
COSTS = StepCosts(CostCurve((1, 64), (1.0, 1.0)), CostCurve((1,), (0.25,)))


def measured(*answers: Answer) -> tune.Measured:
    facts = EngineFacts("heads", NUM_HEADS, NUM_NODES, 300, "float32", 64)
    fits = tune.fit_answers(answers, NUM_NODES)
    return tune.Measured(facts, Recording(answers, COSTS), fits, Yield(np.ones(5), np.ones(5)))


def contrary(length: int, seed: int) -> Answer:
    """Heads that are the surer the less they are right."""
    rng = np.random.default_rng(seed)
    tokens = np.arange(length)
    logs = rng.uniform(-6, -0.01, (length, NUM_HEADS, 1)).astype(np.float32)
    right = rng.random(logs.shape) > np.exp(logs)
    following = tokens[:, None, None] + 1 + np.arange(NUM_HEADS)[:, None]
    return Answer(tokens, np.where(right, following, 0), logs)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "weights"
    file.write_bytes(b"weights")
    return file


def test_a_scale_that_is_nearly_nothing_makes_a_valid_file(weights: Path) -> None:
    found = measured(*(contrary(600_000, i) for i in (0, 1)))
    fits, tuning = found.fits, tune.learn(OPTIONS, found, "p", weights)
    assert fits[0].calibration.scale < 5e-5, "else it is not the case that this is about"
    assert HeadsTuning.model_validate_json(tuning.model_dump_json()) == tuning
    for fit, scaling in zip(fits, tuning.calibration, strict=True):
        assert scaling.scale == pytest.approx(fit.calibration.scale, rel=1e-3)
        assert scaling.bias == pytest.approx(fit.calibration.bias, abs=1e-4)


def test_a_tuning_says_where_it_comes_from(weights: Path, tmp_path: Path) -> None:
    answers = measured(contrary(30, 0), contrary(12, 1))
    tuning = tune.learn(OPTIONS, answers, "p.txt", weights)
    assert (tuning.measured_on.model, tuning.measured_on.prompts) == ("org/model", "p.txt")
    assert (tuning.measured_on.num_prompts, tuning.measured_on.num_tokens) == (2, 42)
    assert (tuning.draft_vocab_size, tuning.measured_on.dtype) == (300, "float32")
    local = replace(OPTIONS, model=str(tmp_path))
    assert tune.learn(local, answers, "p", weights).measured_on.model == tmp_path.name


def test_one_answer_is_too_little() -> None:
    with pytest.raises(tune.TuneError, match=r"1 answers.*give more prompts"):
        tune.fit_answers([contrary(30, 0)], NUM_NODES)


def test_the_engine_starts_without_an_earlier_tuning() -> None:
    # With one, the fit would be on top of it, and a malformed one could not be replaced.
    plain = tune.settings(OPTIONS).options
    assert plain["speculative_config"] == {
        "method": "medusa",
        "tuning": False,
        "draft_vocab_size": "auto",
    }
    assert (
        plain["enforce_eager"]
        and not tune.settings(replace(OPTIONS, mode=Mode.COMPILED)).options["enforce_eager"]
    )
    asked = replace(OPTIONS, heads=Path("h"), num_speculative_tokens=5, draft_vocab_size=100)
    assert tune.settings(asked).options["speculative_config"] == {
        "method": "medusa",
        "tuning": False,
        "draft_vocab_size": 100,
        "model": "h",
        "num_speculative_tokens": 5,
    }


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--draft-vocab-size", "0"], "--draft-vocab-size"),
        (["--draft-vocab-size", "most"], "--draft-vocab-size"),
        (["--out", "FILE/sub"], "--out"),
        (["--json", "FILE/sub/figures.json"], "--json"),
    ],
)
def test_what_cannot_work_is_refused_before_the_work(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "_measure", lambda *_: pytest.fail("an engine was started"))
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["tune", "model", *arguments])
    assert result.exit_code == 2 and named in result.output


def test_an_empty_prompts_file_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n")
    result = CliRunner().invoke(app, ["tune", "model", "--prompts", str(prompts)])
    assert result.exit_code == 1 and "has no prompts" in " ".join(result.output.split())
