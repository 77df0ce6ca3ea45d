"""What trees cannot do is refused by name before weights load: here there are none to load."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from medusa_plugin.vllm_glue.support import UnsupportedFeatureError
from tests.engine.conftest import HIDDEN_SIZE, VOCAB_SIZE, inspect_in_process

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
ONE_CACHE_GROUP = {"disable_hybrid_kv_cache_manager": True}


@pytest.mark.parametrize(
    ("architecture", "model_type", "config", "options", "name"),
    [
        ("MambaForCausalLM", "mamba", SIZES, {}, "Mamba and other models with recurrent state"),
        (
            "JambaForCausalLM",
            "jamba",
            SIZES | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1},
            {},
            "hybrid",
        ),
        ("DeepseekV2ForCausalLM", "deepseek_v2", SIZES, {}, "multi-head latent attention (MLA)"),
        ("BartForConditionalGeneration", "bart", {}, {}, "encoder-decoder models"),
        ("WhisperForConditionalGeneration", "whisper", {}, {}, "multimodal models"),
        (
            "LlamaForCausalLM",
            "llama",
            SIZES | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}},
            {},
            "M-RoPE positions",
        ),
        (
            "BloomForCausalLM",
            "bloom",
            {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "n_layer": 2, "n_head": 2},
            {},
            "ALiBi in attention",
        ),
        (
            "GptOssForCausalLM",
            "gpt_oss",
            SIZES | {"head_dim": 32, "num_local_experts": 2, "num_experts_per_tok": 1},
            ONE_CACHE_GROUP,
            "attention sinks in attention",
        ),
        ("LlamaForCausalLM", "llama", SIZES, {"runner": "pooling"}, "runner 'pooling'"),
        ("LlamaForCausalLM", "llama", SIZES, {"pipeline_parallel_size": 2}, "pipeline_parallel"),
        ("LlamaForCausalLM", "llama", SIZES, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        (
            "LlamaForCausalLM",
            "llama",
            SIZES,
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "KV connectors",
        ),
    ],
)
def test_refused_without_looking_for_weights(
    architecture: str,
    model_type: str,
    config: dict[str, Any],
    options: dict[str, Any],
    name: str,
    make_brief_engine: Any,
    random_heads: Path,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    from transformers import AutoConfig

    fields = AutoConfig.for_model(model_type, **config).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(fields | {"architectures": [architecture]}))
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    inspect_in_process(architecture)
    with pytest.raises(UnsupportedFeatureError, match=re.escape(name)):
        make_brief_engine(
            model=str(tmp_path),
            speculative_config={"method": "medusa", "model": str(random_heads)},
            **options,
        )
    assert not list(tmp_path.glob("*.safetensors"))
