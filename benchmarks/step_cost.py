"""Where the time of a decode step goes: plain vLLM against Medusa trees, stage by stage.

Batch 1, the embedded model, greedy, one process. Engines take turns question by question, and
medians of single steps are shown, so noise of the machine hits both alike.

    python benchmarks/step_cost.py                # vLLM's default, compiled
    python benchmarks/step_cost.py --mode eager --nodes 3,7,15 --json build/step_cost.json

With several sizes one Medusa engine drafts the prefixes of one tree in turn.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import typer
from rich.console import Console
from rich.table import Table

from medusa_plugin import step
from medusa_plugin.commands.demo import QUESTIONS
from medusa_plugin.embedded import embedded_heads_path, ensure_embedded_model

# Stage -> (owner inside an engine, attribute). A stage inside another is shown indented and is
# part of it. "rest" is what no stage covers.
STAGES = {
    "schedule": ("scheduler", "schedule"),
    "prepare inputs": ("runner", "_prepare_inputs"),
    "attention metadata": ("runner", "_build_attention_metadata"),
    "target forward": ("runner", "_model_forward"),
    "lm_head": ("model", "compute_logits"),
    "accept": ("step", "walk"),
    "compact": ("step", "compact"),
    "draft + tree": ("drafter", "draft"),
    "  heads": ("heads", "propose"),
    "sample (plain)": ("runner", "sampler"),
    "update": ("scheduler", "update_from_output"),
}


class StageClock:
    """Times calls by stage, one list of seconds per engine step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.current: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Replace `owner.name` by a timed call of itself."""
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.current[stage] += time.perf_counter() - started

        setattr(owner, name, timed)

    def end_step(self, seconds: float, keep: bool) -> None:
        """Close a step of `seconds`; drop it unless `keep`."""
        if keep:
            self.steps.append({"step": seconds, **self.current})
        self.current.clear()


def make_engine(mode: str, dtype: str, nodes: int | None) -> tuple[Any, StageClock]:
    """An engine with its stages timed."""
    from vllm import LLM

    options: dict[str, Any] = {}
    if nodes is not None:
        options["speculative_config"] = {
            "method": "medusa",
            "model": str(embedded_heads_path()),
            "num_speculative_tokens": nodes,
        }
    llm = LLM(
        model=str(ensure_embedded_model()),
        dtype=dtype,
        enforce_eager=mode == "eager",
        max_model_len=2048,
        max_num_seqs=4,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **options,
    )
    runner: Any = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    owners = {
        "scheduler": llm.llm_engine.engine_core.engine_core.scheduler,
        "runner": runner,
        "model": runner.model,
    }
    if nodes is not None:
        owners |= {"step": step, "heads": runner.medusa_drafter.heads}
    clock = StageClock()
    for stage, (owner, name) in STAGES.items():
        if name == "sampler":
            if nodes is None:
                clock.wrap(runner.sampler, "forward", stage)
        elif owner in owners:
            clock.wrap(owners[owner], name, stage)
    return llm, clock


def answer(llm: Any, clock: StageClock, question: str, max_tokens: int, request: str) -> int:
    """Answer one question; returns the tokens of its decode steps."""
    from vllm import SamplingParams

    prompt = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine = llm.llm_engine
    engine.add_request(request, {"prompt_token_ids": prompt}, params)
    seen, first = 0, True
    clock.current.clear()
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        outputs = engine.step()
        clock.end_step(time.perf_counter() - started, keep=bool(outputs) and not first)
        for output in outputs:
            seen = len(output.outputs[0].token_ids)
            first = False
    return seen - 1


def prefix_drafter(full: step.HeadsDrafter, nodes: int) -> step.HeadsDrafter:
    """The drafter of the first `nodes` nodes of the tree of `full`."""
    return step.HeadsDrafter(full.heads, full.tree.prefix(nodes))


def main(
    mode: str = "compiled",
    dtype: str = "bfloat16",
    nodes: Annotated[str, typer.Option(help="Sizes to compare, comma-separated.")] = "5",
    max_tokens: int = 96,
    repetitions: int = 3,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and print the split of a decode step."""
    sizes = [int(size) for size in nodes.split(",")]
    plain, plain_clock = make_engine(mode, dtype, None)
    medusa, medusa_clock = make_engine(mode, dtype, max(sizes))
    proposer = medusa.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    full = proposer.drafter
    steps: dict[str, list[dict[str, float]]] = defaultdict(list)
    tokens: dict[str, int] = defaultdict(int)
    answer(plain, plain_clock, "Hello", 16, "warm-plain")
    answer(medusa, medusa_clock, "Hello", 16, "warm-medusa")
    for repetition in range(repetitions):
        for i, (question,) in enumerate(QUESTIONS):
            for size in (0, *sizes):
                name = f"{size} nodes" if size else "plain"
                llm, clock = (medusa, medusa_clock) if size else (plain, plain_clock)
                clock.steps.clear()
                if size:
                    proposer.drafter = prefix_drafter(full, size)
                    clock.wrap(proposer.drafter, "draft", "draft + tree")
                tokens[name] += answer(llm, clock, question, max_tokens, f"{name}-{repetition}-{i}")
                steps[name] += clock.steps

    result = {name: summary(steps[name], tokens[name]) for name in steps}
    for numbers in result.values():
        numbers["speed-up"] = numbers["tokens per step"] / numbers["step"] * result["plain"]["step"]
    table = Table(title=f"milliseconds per decode step, medians ({mode}, {dtype}, batch 1)")
    table.add_column("stage")
    for name in result:
        table.add_column(name, justify="right")
    for stage in result["plain"]:
        table.add_row(stage, *(f"{numbers[stage]:.3f}" for numbers in result.values()))
    Console().print(table)
    if json_file:
        circumstances = {
            "command": " ".join(sys.argv),
            "git_sha": subprocess.run(
                ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
            ).stdout.strip(),
            "hardware": {"machine": platform.machine(), "cores": os.cpu_count()},
        }
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result | circumstances, indent=1))


def summary(steps: list[dict[str, float]], tokens: int) -> dict[str, float]:
    """Median milliseconds of a step, its stages and the rest; tokens per step."""
    numbers = {
        stage: 1e3 * statistics.median(times.get(stage, 0.0) for times in steps)
        for stage in ("step", *STAGES)
    }
    covered = sum(numbers[stage] for stage in STAGES if not stage.startswith(" "))
    numbers["rest"] = numbers["step"] - covered
    numbers["tokens per step"] = tokens / len(steps)
    return numbers


if __name__ == "__main__":
    typer.run(main)
