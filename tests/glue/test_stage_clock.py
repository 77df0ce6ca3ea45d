"""The clock of stages: disjoint times, and nothing of it left behind."""

from __future__ import annotations

import time
from types import ModuleType, SimpleNamespace

import pytest

from medusa_plugin.vllm_glue.stage_clock import StageClock


class Engine:
    def outer(self) -> str:
        time.sleep(0.01)
        return self.inner()

    def inner(self) -> str:
        time.sleep(0.03)
        return "done"


def test_a_call_inside_another_counts_for_its_own_stage_only() -> None:
    engine = Engine()
    with StageClock({"a": ((engine, "outer"),), "b": ((engine, "inner"),)}) as clock:
        started = time.perf_counter()
        assert engine.outer() == "done"
        clock.end_step(time.perf_counter() - started, keep=True)
    (step,) = clock.steps
    assert step["b"] >= 0.03 > step["a"] >= 0.01
    assert step["a"] + step["b"] <= step["step"]


def test_calls_of_one_stage_inside_each_other_count_once() -> None:
    engine = Engine()
    with StageClock({"a": ((engine, "outer"), (engine, "inner"))}) as clock:
        started = time.perf_counter()
        engine.outer()
        clock.end_step(time.perf_counter() - started, keep=True)
    assert 0.04 <= clock.steps[0]["a"] <= clock.steps[0]["step"]


def test_a_step_not_kept_leaves_no_time_to_the_next() -> None:
    engine = Engine()
    with StageClock({"a": ((engine, "inner"),)}) as clock:
        engine.inner()
        clock.end_step(1.0, keep=False)
        clock.end_step(2.0, keep=True)
    assert clock.steps == [{"step": 2.0}]


def test_a_call_that_raises_is_timed_and_leaves_the_clock_usable() -> None:
    def fail() -> None:
        raise ValueError

    owner = SimpleNamespace(fail=fail)
    with StageClock({"a": ((owner, "fail"),)}) as clock:
        with pytest.raises(ValueError):
            owner.fail()
        clock.end_step(1.0, keep=True)
    assert clock.steps[0]["a"] > 0 and not clock._inner


def test_instances_and_modules_are_as_before_afterwards() -> None:
    engine, module = Engine(), ModuleType("stage")
    module.call = call = lambda: None  # type: ignore[attr-defined]
    with StageClock({"a": ((engine, "inner"),), "b": ((module, "call"),)}):
        assert "inner" in vars(engine) and module.call is not call
    assert vars(engine) == {} and module.call is call


def test_a_stage_that_moved_is_an_error_and_nothing_stays_wrapped() -> None:
    engine = Engine()
    clock = StageClock({"a": ((engine, "inner"),), "b": ((engine, "gone"),)})
    with pytest.raises(AttributeError, match="gone"), clock:
        pytest.fail("entered")
    assert vars(engine) == {}
