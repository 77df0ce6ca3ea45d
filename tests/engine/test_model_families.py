"""Models of other families than the tiny Llama decode through trees as through plain vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine import harness
from tests.engine.conftest import EOS_TOKEN_ID, HIDDEN_SIZE, VOCAB_SIZE, inspect_in_process

WINDOW = 24  # shorter than prompts and answers, not a multiple of a block
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": EOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
    "initializer_range": 0.35,
}
ONE_CACHE_GROUP = {"disable_hybrid_kv_cache_manager": True}


@dataclass(frozen=True)
class Family:
    """A model type of transformers, made tiny."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Of the engine."""
    embedding_scale: float = 1.0
    """Of a tied embedding: one that is large beside the layers' output repeats its input."""


FAMILIES = {
    "llama-tied": Family("llama", {"tie_word_embeddings": True}, embedding_scale=0.3),
    "qwen2": Family("qwen2", {"tie_word_embeddings": True}, embedding_scale=0.3),
    "qwen3": Family("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    # A window in every layer, narrower than a tree has rows: it goes by positions, not by slots.
    "mistral": Family("mistral", {"sliding_window": 8, "tie_word_embeddings": False}),
    # A window in every other layer; soft-caps low enough to change which token wins.
    "gemma2": Family(
        "gemma2",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
        ONE_CACHE_GROUP,
        embedding_scale=0.05,  # Gemma multiplies embeddings by 8 here
    ),
    # Two rotary tables, and norms of queries and keys.
    "gemma3": Family(
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 32,
        },
        ONE_CACHE_GROUP,
        embedding_scale=0.05,
    ),
    # Half of each head is rotated; fused projections.
    "phi3": Family(
        "phi3", {"partial_rotary_factor": 0.5, "sliding_window": None, "pad_token_id": 0}
    ),
    # Attention and MLP side by side, and an output bias; vLLM runs it as transformers' module.
    "phi": Family("phi", {"partial_rotary_factor": 0.5}),
}


def make_model(family: Family, directory: Path) -> None:
    """Save a random model of `family`, biases and norms included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **{**SIZES, **family.config})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
        elif "embed_tokens" in name:
            parameter.data *= family.embedding_scale
    model.save_pretrained(directory)
    for architecture in (type(model).__name__, "TransformersForCausalLM"):
        inspect_in_process(architecture)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(
    make_brief_engine: Any, random_heads: Path, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    family = FAMILIES[name]
    make_model(family, tmp_path)
    options = {"model": str(tmp_path), "tokenizer": str(tiny_model), **family.options}
    plain = make_brief_engine(**options)
    medusa = make_brief_engine(
        **options,
        speculative_config=harness.speculation(random_heads, sizes="fixed"),
    )
    requests = harness.prompts(6, lengths=[2, 23, 40, 70], vocab_size=VOCAB_SIZE)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for params in (greedy, SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)):
        expected = harness.answers(plain, requests, params)
        for hit_rate in harness.HIT_RATES.values():
            drafter = harness.plant(medusa, [harness.BUSHY, harness.DEEP], VOCAB_SIZE, hit_rate)
            for request, known in zip(requests, expected, strict=True):
                drafter.learn(request, known[0].token_ids)
            assert harness.answers(medusa, requests, params) == expected
            harness.assert_draft_did_its_part(drafter, harness.BUSHY)
    used = {token for text in harness.texts(plain, requests, greedy) for token in text}
    assert len(used) > 30, "the model repeats itself: too dull to test anything"
