"""Measured costs are kept by circumstances, and never trusted where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa_plugin.cost_cache import costs_file, read_costs, write_costs
from medusa_plugin.tree.budget import CostCurve, StepCosts

COSTS = StepCosts(CostCurve((1, 2, 4), (0.1, 0.1, 0.2)), CostCurve((1,), (0.01,)))
HERE = {"model": "a", "threads": "2"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_costs_come_back_under_the_same_circumstances_only() -> None:
    assert read_costs(HERE) is None
    write_costs(HERE, COSTS)
    assert read_costs(HERE) == COSTS
    assert read_costs(HERE | {"threads": "4"}) is None


def test_a_file_moved_to_another_machine_is_not_used() -> None:
    write_costs(HERE, COSTS)
    other = HERE | {"model": "b"}
    costs_file(HERE).rename(costs_file(other))
    assert read_costs(other) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"circumstances": {}}',
        '{"circumstances": {"model": "a", "threads": "2"}, "verify": {"rows": [2, 1], "seconds": '
        '[1, 1]}, "draft": {"rows": [1], "seconds": [1]}}',
        '{"circumstances": {"model": "a", "threads": "2"}, "verify": {"rows": [1], "seconds": '
        '["x"]}, "draft": {"rows": [1], "seconds": [1]}}',
    ],
)
def test_a_damaged_file_is_named_and_replaced(
    content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = costs_file(HERE)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert read_costs(HERE) is None
    assert str(file) in caplog.text
    write_costs(HERE, COSTS)
    assert read_costs(HERE) == COSTS


def test_a_cache_that_cannot_be_written_is_named(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the directory should be")
    write_costs(HERE, COSTS)
    assert str(cache) in caplog.text
    assert read_costs(HERE) is None


def test_a_full_cache_keeps_no_part_of_a_file(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("medusa_plugin.atomic_file.os.replace", full)
    write_costs(HERE, COSTS)
    assert "No space left" in caplog.text
    assert [path for path in cache.rglob("*") if path.is_file()] == []
