"""The engines of a run: one plain, and Medusa in configurations that strain the scheduler."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.engine.conftest import start_engine, write_random_heads, write_tiny_model
from tests.engine.harness import runner_of
from tests.soak.cases import MAX_MODEL_LEN, Case
from tests.soak.exact import ExactModel


@dataclass(frozen=True)
class Configuration:
    """How a Medusa engine differs from the plain one, which has room for everything."""

    num_nodes: int
    options: dict[str, Any]


CONFIGURATIONS = {
    "roomy": Configuration(20, {"max_num_seqs": 48, "max_num_batched_tokens": 4096}),
    "chunked": Configuration(15, {"max_num_seqs": 8, "max_num_batched_tokens": 64}),
    "preempting": Configuration(
        31, {"max_num_seqs": 16, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 20}
    ),
    "starved": Configuration(
        10,
        {
            "max_num_seqs": 6,
            "max_num_batched_tokens": 96,
            "num_gpu_blocks_override": 10,
            "enable_prefix_caching": False,
        },
    ),
    "big-blocks": Configuration(
        63,
        {
            "max_num_seqs": 32,
            "max_num_batched_tokens": 2048,
            "block_size": 128,
            "num_gpu_blocks_override": 40,
        },
    ),
    "priorities": Configuration(
        24,
        {
            "max_num_seqs": 12,
            "max_num_batched_tokens": 160,
            "long_prefill_token_threshold": 40,
            "num_gpu_blocks_override": 24,
            "scheduling_policy": "priority",
            # Plain vLLM errs with both: a request that is preempted in the very step that scheduled
            # it leaves blocks in the prefix cache that were never computed (vLLM issue 57580).
            "enable_prefix_caching": False,
        },
    ),
}
PLAIN = {
    "max_num_seqs": 64,
    # vLLM on CPU cannot prefill a seeded request in chunks, so nothing is ever cut here.
    "max_num_batched_tokens": 64 * MAX_MODEL_LEN,
    "num_gpu_blocks_override": 64 * MAX_MODEL_LEN // 32 + 1,
    "enable_prefix_caching": False,
}


@dataclass
class Completion:
    """What a client has of one answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, Any]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Outcome:
    """What a client has of one request."""

    completions: dict[int, Completion] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, Any] | None] | None = None
    finished: bool = False
    aborted: bool = False

    def add(self, output: Any, is_delta: bool) -> None:
        """Note one `RequestOutput`."""
        if output.prompt_logprobs is not None:
            known = self.prompt_logprobs if is_delta else None
            self.prompt_logprobs = [*(known or []), *output.prompt_logprobs]
        for new in output.outputs:
            known = self.completions.setdefault(new.index, Completion())
            logprobs = None if new.logprobs is None else list(new.logprobs)
            if is_delta:
                known.token_ids += new.token_ids
                known.text += new.text
                if logprobs is not None:
                    known.logprobs = (known.logprobs or []) + logprobs
            else:
                known.token_ids, known.text = list(new.token_ids), new.text
                known.logprobs = logprobs
            known.finish_reason, known.stop_reason = new.finish_reason, new.stop_reason
        self.finished |= output.finished


class Engine:
    """A `vllm.LLM` in this process, and what it must give back after its requests.

    Args:
        llm: the engine.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.preemptions = 0
        drafter = getattr(self.runner, "drafter", None)
        self.heads = None if drafter is None else drafter.drafter.heads
        """Of Medusa, as loaded."""
        self._count_preemptions()

    @property
    def runner(self) -> Any:
        """Its model runner."""
        return runner_of(self.llm)

    @property
    def scheduler(self) -> Any:
        """Its scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def set_logprobs_mode(self, mode: str) -> None:
        """What log-probabilities are, for all requests that come."""
        sampler = self.runner.sampler
        for owner in (sampler, sampler.topk_topp_sampler, self.runner.model_config):
            owner.logprobs_mode = mode

    def serve(
        self,
        cases: Sequence[Case],
        params: Sequence[Any],
        *,
        at_random: random.Random | None = None,
        reset_probability: float = 0.0,
    ) -> dict[str, Outcome]:
        """Answer `cases`, all at once or, with `at_random`, as they arrive and are aborted."""
        engine = self.llm.llm_engine
        outcomes: dict[str, Outcome] = {}
        deltas = {}
        waiting = list(zip(cases, params, strict=True))[::-1]
        aborts: dict[int, list[str]] = {}
        step = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and (at_random is None or waiting[-1][0].arrival <= step):
                case, asked = waiting.pop()
                outcomes[case.name] = Outcome()
                deltas[case.name] = asked.output_kind.name == "DELTA"
                engine.add_request(
                    case.name,
                    {"prompt_token_ids": list(case.prompt)},
                    asked,
                    priority=case.priority if self._has_priorities else 0,
                )
                if at_random is not None and case.abort_after is not None:
                    aborts.setdefault(step + case.abort_after, []).append(case.name)
            for name in aborts.pop(step, ()):
                if not outcomes[name].finished:
                    outcomes[name].aborted = True
                    engine.abort_request([name])
            for output in engine.step():
                outcomes[output.request_id].add(output, deltas[output.request_id])
            if at_random is not None and at_random.random() < reset_probability:
                engine.reset_prefix_cache(reset_running_requests=True)
            step += 1
        return outcomes

    def leftovers(self) -> dict[str, int]:
        """After all requests ended: blocks that did not come back, and other things kept."""
        # What ended in the last step is told to the worker in the next one.
        flush = Case("flush", (1, 2), {"temperature": 0.0, "max_tokens": 1}, 0)
        self.serve([flush], [flush.sampling_params()])
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        missing = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if not self.llm.llm_engine.reset_prefix_cache():
            missing = max(missing, 1)
        held = sum(block.ref_cnt > 0 and not block.is_null for block in pool.blocks)
        kept = {
            "leaked_blocks": max(missing, held),
            "scheduler requests": len(scheduler.requests),
            "front end requests": len(self.llm.llm_engine.output_processor.request_states),
        }
        runner = self.runner
        old = {name for name in runner.requests if not name.startswith("flush")}
        kept["runner requests"] = len(old)
        if hasattr(runner, "medusa_drafter"):
            for name in ("_proposed", "_running._settings", "drafter.drafter.kept"):
                owner = runner
                for part in name.split("."):
                    owner = getattr(owner, part)
                kept[name] = len([i for i in owner if not i.startswith("flush")])
        return kept

    def shut_down(self) -> None:
        """End it."""
        self.llm.llm_engine.engine_core.shutdown()

    @property
    def _has_priorities(self) -> bool:
        return bool(self.scheduler.policy.name == "PRIORITY")

    def _count_preemptions(self) -> None:
        original = self.scheduler._preempt_request

        def preempt(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return original(*args, **kwargs)

        self.scheduler._preempt_request = preempt


class Laboratory:
    """A tiny model, random heads, and engines over them, each started when first asked for."""

    def __init__(self, directory: Path) -> None:
        self._model = write_tiny_model(_made(directory / "model"))
        self._heads = write_random_heads(_made(directory / "heads"))
        self._engines: dict[str, Engine] = {}

    @cached_property
    def exact(self) -> ExactModel:
        """The model without engine, to judge rounding by."""
        return ExactModel(self._model)

    @property
    def plain(self) -> Engine:
        """Without speculation."""
        return self._engine("plain", PLAIN)

    def medusa(self, name: str) -> Engine:
        """With Medusa, by the name of its configuration."""
        configuration = CONFIGURATIONS[name]
        speculative = {
            "method": "medusa",
            "model": str(self._heads),
            "num_speculative_tokens": configuration.num_nodes,
        }
        options = {
            "speculative_config": speculative,
            # The drafters of the run bring costs of their own, which do not vary from run to run.
            "additional_config": {"medusa": {"sizes": "fixed"}},
            **configuration.options,
        }
        return self._engine(name, options)

    def shut_down(self) -> None:
        """End all engines; whoever asks for one after that gets a new one.

        They share vLLM's process groups, so one that failed cannot be ended alone.
        """
        for engine in self._engines.values():
            engine.shut_down()
        self._engines.clear()

    def _engine(self, name: str, options: dict[str, Any]) -> Engine:
        if name not in self._engines:
            llm = start_engine(self._model, max_model_len=MAX_MODEL_LEN, **options)
            self._engines[name] = Engine(llm)
        return self._engines[name]


@contextmanager
def laboratory() -> Iterator[Laboratory]:
    """A `Laboratory` in a temporary directory, shut down at the end."""
    with tempfile.TemporaryDirectory(prefix="medusa-soak-") as directory:
        made = Laboratory(Path(directory))
        try:
            yield made
        finally:
            made.shut_down()


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
