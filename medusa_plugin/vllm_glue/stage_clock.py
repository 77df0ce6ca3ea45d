"""Where the time of an engine's steps goes, stage by stage; installed only while it measures."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

Stages = Mapping[str, tuple[tuple[Any, str], ...]]
"""Stage -> the calls (owner, attribute) it consists of."""

TARGET_STAGES = ("target forward", "lm_head")
"""What plain decoding could not do without; all else of a step is overhead."""


class StageClock:
    """Context in which the calls of `stages` are timed.

    A call inside another one counts for its own stage only, so the stages of a step are disjoint
    and what they leave of it was spent elsewhere.

    Raises:
        AttributeError: on entry, if an owner lacks the attribute: vLLM or we have moved it.
    """

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._restore: list[Callable[[], None]] = []
        self._inner: list[float] = []
        """For each timed call in progress, the seconds spent in timed calls inside it."""
        self._current: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []
        """Of each step kept: seconds of the whole ("step") and of each stage that ran."""

    def __enter__(self) -> StageClock:
        try:
            for stage, calls in self._stages.items():
                for owner, name in calls:
                    self._wrap(owner, name, stage)
        except AttributeError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for restore in reversed(self._restore):
            restore()
        self._restore.clear()

    def _wrap(self, owner: Any, name: str, stage: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)
        own = name in vars(owner)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - started
                self._current[stage] += seconds - self._inner.pop()
                if self._inner:
                    self._inner[-1] += seconds

        setattr(owner, name, timed)
        # A method lies in the class: what we put into the instance is taken out again.
        self._restore.append(
            functools.partial(setattr, owner, name, original)
            if own
            else functools.partial(delattr, owner, name)
        )

    def end_step(self, seconds: float, keep: bool) -> None:
        """Close a step that took `seconds`; forget it unless `keep`."""
        if keep:
            self.steps.append({"step": seconds, **self._current})
        self._current.clear()


def engine_stages(llm: Any) -> Stages:
    """The stages of a step of `llm`, a `vllm.LLM` whose engine runs in this process."""
    from medusa_plugin import step
    from medusa_plugin.heads.base import SequentialHeads
    from medusa_plugin.vllm_glue.model_runner import MedusaModelRunner

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    stages: dict[str, tuple[tuple[Any, str], ...]] = {
        "schedule": ((scheduler, "schedule"),),
        "prepare inputs": ((runner, "_prepare_inputs"),),
        "attention metadata": ((runner, "_build_attention_metadata"),),
        "target forward": ((runner, "_model_forward"),),
        "lm_head": ((runner.model, "compute_logits"),),
    }
    if isinstance(runner, MedusaModelRunner):
        drafter: Any = runner.medusa_drafter
        sequential = isinstance(drafter.heads, SequentialHeads)
        calls = ("begin", "advance", "logits") if sequential else ("propose",)
        stages |= {
            "accept": ((step, "walk"),),
            "compact": ((step, "compact"),),
            "heads": tuple((drafter.heads, call) for call in calls),
            "draft": ((drafter, "draft"),),
        }
    else:
        samplers = [runner.sampler]
        if runner.speculative_config is not None:
            samplers.append(runner.rejection_sampler)
            stages["draft"] = ((runner, "propose_draft_token_ids"),)
        stages["sample"] = tuple((sampler, "forward") for sampler in samplers)
    return stages | {"update": ((scheduler, "update_from_output"),)}
