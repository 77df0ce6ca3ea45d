"""What a decode step costs on this machine, measured when the engine starts."""

from __future__ import annotations

import functools
import logging
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.batch import StepRequest
from medusa_plugin.cost_cache import read_costs, write_costs
from medusa_plugin.draft import TreeDrafter
from medusa_plugin.heads import peek_heads
from medusa_plugin.request_options import RequestOptions
from medusa_plugin.tree.budget import CostCurve, StepCosts
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.vllm_glue import host
from medusa_plugin.vllm_glue.tensor_parallel import hear, tell
from medusa_plugin.vllm_glue.translate import medusa_config

logger = logging.getLogger("vllm.medusa")

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 128)
REPETITIONS = 5
MAX_REPETITIONS = 12
"""While there is more noise than `MAX_NOISE`: on a busy machine."""
MAX_NOISE = 1.25
"""A curve with more noise is not kept."""


def step_costs(runner: Any, drafter: TreeDrafter) -> StepCosts:
    """Costs of this engine's steps, from the cache or measured now (a few seconds).

    The other tensor-parallel ranks have to call `follow_measurement` meanwhile.

    Args:
        runner: vLLM's model runner, ready to run.
        drafter: knows no costs yet, so that it drafts trees of full size.
    """
    circumstances = _circumstances(runner, drafter)
    costs = read_costs(circumstances)
    if costs is None:
        started = time.perf_counter()
        costs = _measure(runner, drafter)
        logger.info("medusa: step costs measured in %.1f s", time.perf_counter() - started)
        if costs.verify.noise > MAX_NOISE:
            logger.warning(
                "medusa: this machine was busy while step costs were measured (fewer rows took up "
                "to %.1f times as long as more): they are used now, but measured anew at the next "
                "start",
                costs.verify.noise,
            )
        else:
            write_costs(circumstances, costs)
    tell(None)  # no forward pass is left to follow
    rows, seconds = costs.verify.rows, costs.verify.seconds
    logger.info(
        "medusa: verifying %s rows takes %s ms",
        ", ".join(map(str, rows)),
        ", ".join(f"{1e3 * value:.1f}" for value in seconds),
    )
    return costs


@torch.inference_mode()
def follow_measurement(runner: Any) -> None:
    """Take part in the forward passes of `step_costs`, which another rank runs."""
    while (count := hear()) is not None:
        _verify(runner, count)
    runner.maybe_remove_all_loras(runner.lora_config)


def _verify(runner: Any, count: int) -> None:
    lora = runner.lora_config
    num_adapters = 0 if lora is None else lora.max_loras
    hidden, _ = runner._dummy_run(count, remove_lora=False, num_active_loras=num_adapters)
    # One request whose rows are all asked for: adapters of the output go by these rows.
    rows = np.array([count], dtype=np.int32)
    with runner.maybe_select_dummy_loras(
        lora, rows, num_sampled_tokens=rows, num_active_loras=num_adapters
    ):
        runner.model.compute_logits(hidden[:count])
    _wait(runner.device)


@torch.inference_mode()
def _measure(runner: Any, drafter: TreeDrafter) -> StepCosts:
    most = min(runner.max_num_tokens, ROWS[-1])
    rows = [count for count in ROWS if count <= most]
    batches = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= runner.max_num_reqs]

    def verify(count: int) -> None:
        _verify(runner, tell(count))

    config = runner.vllm_config.model_config
    shape = batches[-1], config.get_hidden_size()
    hidden_states = torch.zeros(shape, dtype=config.dtype, device=runner.device)
    requests = _requests(batches[-1])
    ids = [request.request_id for request in requests]
    paths = [AcceptedPath((), (0,))] * batches[-1]

    def draft(count: int) -> None:
        drafter.draft(requests[:count], paths[:count], hidden_states[:count])
        drafter.forget(ids[:count])  # nothing is to be learnt from this

    try:
        return StepCosts(_curve(verify, rows), _curve(draft, batches))
    finally:
        runner.maybe_remove_all_loras(runner.lora_config)


def _requests(count: int) -> list[StepRequest]:
    """Requests that ask for nothing special, to be drafted for."""
    return [
        StepRequest(
            request_id=f"cost-{i}",
            tree=DraftTree.root_only(),
            first_row=i,
            root_position=0,
            committed=np.zeros(1, np.int32),
            drafts_next=True,
            options=RequestOptions(),
            typical_temperature=None,
        )
        for i in range(count)
    ]


def _curve(work: Callable[[int], None], counts: Sequence[int]) -> CostCurve:
    """Least seconds of `work` for each count: other load only ever adds to them.

    The counts take turns, so that a slow moment of the machine does not fall on one of them.
    """
    for count in counts:
        work(count)  # the first call of a shape prepares it
    seconds = [math.inf] * len(counts)
    for repetition in range(MAX_REPETITIONS):
        for i, count in enumerate(counts):
            started = time.perf_counter()
            work(count)
            seconds[i] = min(seconds[i], time.perf_counter() - started)
        curve = CostCurve(tuple(counts), tuple(seconds))
        if repetition + 1 >= REPETITIONS and curve.noise <= MAX_NOISE:
            return curve
    return curve


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _circumstances(runner: Any, drafter: TreeDrafter) -> dict[str, str]:
    config, heads = runner.vllm_config, drafter.heads
    heads_path = medusa_config(config).heads
    model = config.model_config
    return {
        "model": _shape(model),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "adapters": _adapters(config.lora_config),
        "compilation": str(config.compilation_config.mode),
        "heads": f"{peek_heads(heads_path).describe()}, {heads.max_top_k} tokens",
        "trees": f"{drafter.num_nodes} nodes, {'dynamic' if drafter.tree is None else 'static'}",
        "processor": _processor(runner.device),
        "tensor parallel": str(config.parallel_config.tensor_parallel_size),
        "threads": str(torch.get_num_threads()),
        "vllm": str(host.installed_version()),
        "torch": torch.__version__,
    }


def _adapters(lora_config: Any) -> str:
    if lora_config is None:
        return "none"
    return f"{lora_config.max_loras} of rank {lora_config.max_lora_rank}"


def _shape(model: Any) -> str:
    """What of a model its speed depends on: fine-tunes of one model share it."""
    text = model.hf_text_config
    names = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    sizes = ", ".join(f"{name} {getattr(text, name, None)}" for name in names)
    return f"{model.architecture}, {sizes}"


@functools.cache
def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    # Guests often hide the name: family and model tell the generation.
    wanted = ("model name", "cpu family", "model", "stepping")
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return ", ".join(found.get(name, "?") for name in wanted)
