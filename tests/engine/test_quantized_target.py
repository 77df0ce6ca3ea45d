"""A target with int8 weights decodes through trees as through plain vLLM; heads keep their dtype.

Compressed-tensors W8A8 is what vLLM 0.32's CPU wheel runs with float32 activations: its AWQ and
GPTQ kernels are for bfloat16, where rounding would decide between tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from medusa_plugin.vllm_glue.support import UnsupportedFeatureError
from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def quantize(model: Path, directory: Path, lm_head: bool) -> dict[str, Any]:
    """Save `model` with int8 projections, and `lm_head` if wanted; return options of an engine."""
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight") or (lm_head and name == "lm_head.weight"):
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = weight
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": [] if lm_head else ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear", "re:.*lm_head"],
                "weights": {**INT8, "strategy": "channel", "dynamic": False},
                "input_activations": {**INT8, "strategy": "token", "dynamic": True},
            }
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    return {"model": str(directory), "tokenizer": str(model)}


def speculative(heads: Path) -> dict[str, Any]:
    return harness.speculation(heads, sizes="fixed")


def test_int8_target(
    make_brief_engine: Any, random_heads: Path, tiny_model: Path, tmp_path: Path
) -> None:
    options = quantize(tiny_model, tmp_path, lm_head=False)
    plain = make_brief_engine(**options)
    medusa = make_brief_engine(**options, speculative_config=speculative(random_heads))
    layers = harness.runner_of(medusa).model.modules()
    schemes = {type(layer.scheme).__name__ for layer in layers if hasattr(layer, "scheme")}
    assert schemes == {"CompressedTensorsW8A8Int8"}
    requests = harness.prompts(6, lengths=[2, 23, 40], vocab_size=VOCAB_SIZE)
    # The heads' own drafts first: they compute in float32 beside int8 weights.
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = harness.answers(plain, requests, params)
    assert harness.answers(medusa, requests, params) == expected
    for hit_rate in harness.HIT_RATES.values():
        drafter = harness.plant(medusa, [harness.BUSHY, harness.DEEP], VOCAB_SIZE, hit_rate)
        for request, known in zip(requests, expected, strict=True):
            drafter.learn(request, known[0].token_ids)
        assert harness.answers(medusa, requests, params) == expected
        harness.assert_draft_did_its_part(drafter, harness.BUSHY)


def test_a_quantised_lm_head_is_refused(
    make_brief_engine: Any, random_heads: Path, tiny_model: Path, tmp_path: Path
) -> None:
    options = quantize(tiny_model, tmp_path, lm_head=True)
    with pytest.raises(UnsupportedFeatureError, match=r"language-model head.*no plain weight"):
        make_brief_engine(**options, speculative_config=speculative(random_heads))
