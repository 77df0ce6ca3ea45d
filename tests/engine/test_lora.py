"""LoRA adapters: each request of a mixed batch decodes through trees as plain vLLM with its own.

In one process and by two tensor-parallel ranks.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from medusa_plugin.vllm_glue import costs
from tests.engine import harness, ranks
from tests.engine.conftest import HIDDEN_SIZE, VOCAB_SIZE
from tests.engine.drafters import PlantedDrafter

RANK = 4
# Where an adapter adds, with its input and output features in the tiny model. The last goes by
# rows of logits, all others by rows of the batch.
TARGETS = {
    "model.layers.{}.self_attn.q_proj": (HIDDEN_SIZE, 64),
    "model.layers.{}.self_attn.v_proj": (HIDDEN_SIZE, 32),
    "model.layers.{}.mlp.down_proj": (128, HIDDEN_SIZE),
    "lm_head": (HIDDEN_SIZE, VOCAB_SIZE),
}
# A slot is left free: on the CPU, vLLM 0.32 lets requests without an adapter use the last one.
OPTIONS = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


def make_adapter(directory: Path, seed: int) -> str:
    """Save a random adapter as PEFT does."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for target, (inputs, outputs) in TARGETS.items():
            name = f"base_model.model.{target.format(layer)}"
            a = torch.randn(RANK, inputs, generator=generator)
            b = torch.randn(outputs, RANK, generator=generator)
            tensors |= {f"{name}.lora_A.weight": 0.3 * a, f"{name}.lora_B.weight": 0.3 * b}
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [target.rpartition(".")[2] for target in TARGETS],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


def test_adapters_and_none_in_one_batch(
    make_brief_engine: Any, random_heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Costs are measured with adapters in place, which an earlier run may have stored.
    monkeypatch.setattr(costs, "read_costs", lambda circumstances: None)
    monkeypatch.setattr(costs, "write_costs", lambda circumstances, found: None)
    monkeypatch.setattr(costs, "ROWS", (1, 8, 32))
    plain = make_brief_engine(**OPTIONS)
    speculation = {"speculative_config": harness.speculation(random_heads)}
    medusa = make_brief_engine(**OPTIONS, **speculation)
    parallel = make_brief_engine(
        **OPTIONS,
        **speculation,
        additional_config={"medusa": {"sizes": "fixed"}},  # nothing to measure
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    parallel.collective_rpc(ranks.disturb)
    parallel.collective_rpc(ranks.watch)
    first, second = (
        LoRARequest(f"adapter-{i}", i, make_adapter(tmp_path / str(i), seed=i)) for i in (1, 2)
    )
    prompts = harness.prompts(3, lengths=[7, 40, 70], vocab_size=VOCAB_SIZE)
    # The same prompts with each: their prefixes must not be shared in the cache.
    requests = [(prompt, adapter) for prompt in prompts for adapter in (first, None, second)]

    def answers(engine: Any, params: SamplingParams) -> list[tuple[int, ...]]:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            params,
            use_tqdm=False,
            lora_request=[adapter for _, adapter in requests],
        )
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    for params in (
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True),
    ):
        expected = answers(plain, params)
        assert len({known[0] for known in expected}) == len(requests), (
            "the adapters make no difference"
        )
        for engine, hit_rate in itertools.product((medusa, parallel), harness.HIT_RATES.values()):
            drafter = PlantedDrafter([harness.BUSHY, harness.DEEP], VOCAB_SIZE, hit_rate)
            for (prompt, _), (first_token, *rest) in zip(requests, expected, strict=True):
                # A prompt has an answer for each adapter: their first tokens tell them apart.
                drafter.learn([*prompt, first_token], rest)
            engine.collective_rpc(ranks.plant, args=(drafter,))
            assert answers(engine, params) == expected
            drafter = engine.collective_rpc(ranks.planted)[0]
            assert sum(drafter.accepted) > 0 or hit_rate == 0
            assert drafter.branching_steps > 0
    first_rank, second_rank = parallel.collective_rpc(ranks.take_steps)
    assert first_rank and first_rank == second_rank, "the ranks parted"
