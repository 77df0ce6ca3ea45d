"""bench_answers: what its figures are made of, and that loops stay out of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import bench_answers
import pytest
from bench_answers import Ask, measure, summary


class Engine:
    """Says the same to a prompt every time, cut where asked to."""

    def __init__(self, answers: dict[str, list[int]], tokens_per_step: int) -> None:
        self.answers, self.tokens_per_step = answers, tokens_per_step

    def ask(self, messages: list[dict[str, str]], max_tokens: int) -> Any:
        ids = tuple(self.answers[messages[0]["content"]][:max_tokens])
        steps = 1 + -(-(len(ids) - 1) // self.tokens_per_step)
        return SimpleNamespace(token_ids=ids, steps=steps, seconds=steps * 0.5)


def test_answers_end_where_their_loops_begin() -> None:
    answers = {"fine": list(range(41)), "loops": list(range(21)) + [1, 2, 3, 4, 5, 6] * 20}
    engines: Any = {"plain": Engine(answers, 1), "ours": Engine(answers, 4)}
    runs = measure(engines, list(answers), max_tokens=101, repetitions=2)
    found = {(run.engine, run.prompt, run.loops): run.tokens for run in runs}
    assert found["ours", 0, False] == found["ours", 0, True] == 41
    assert 15 <= found["ours", 1, False] <= 27 and found["ours", 1, True] == 101
    assert all(run.equal for run in runs)
    figures = summary(runs)
    assert figures["plain"]["without loops"]["tokens_per_step"] == 1
    assert figures["plain"]["without loops"]["speedups"] == [1, 1]
    assert 3.5 < figures["ours"]["without loops"]["tokens_per_step"] <= 4
    assert figures["ours"]["with loops"]["tokens_per_step"] == 4
    assert 3 < figures["ours"]["without loops"]["speedup"] < 4, "the prefill is in it"


def test_an_answer_that_differs_is_counted() -> None:
    def run(engine: str, equal: bool) -> Ask:
        return Ask(engine, 0, 0, False, 10, 10, 1.0, equal)

    runs = [run("plain", True), run("ours", True), run("ours", False)]
    runs += [Ask(r.engine, 0, 0, True, 10, 10, 1.0, r.equal) for r in runs]
    assert summary(runs)["ours"]["without loops"]["equal_answers"] == pytest.approx(0.5)


def test_the_help_shows_how_to_run_it() -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(bench_answers.app, ["--help"])
    assert result.exit_code == 0 and "python benchmarks/bench_answers.py --prompts" in result.output
