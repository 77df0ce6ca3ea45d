"""Models with sliding windows and logit soft-caps decode through trees as through plain vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine import harness
from tests.engine.conftest import EOS_TOKEN_ID, HIDDEN_SIZE, VOCAB_SIZE

WINDOW = 24  # shorter than prompts and answers, not a multiple of a block, longer than a tree
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "bos_token_id": EOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
    "initializer_range": 0.35,
}


def mistral(directory: Path) -> dict[str, Any]:
    """A window in every layer."""
    from transformers import MistralConfig, MistralForCausalLM

    MistralForCausalLM(MistralConfig(**SIZES, tie_word_embeddings=False)).save_pretrained(directory)
    return {}


def gemma2(directory: Path) -> dict[str, Any]:
    """A window in every other layer, and a soft-cap low enough to change which token wins."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**SIZES, query_pre_attn_scalar=32, attn_logit_softcapping=2.0)
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    model = Gemma2ForCausalLM(config)
    # Gemma multiplies embeddings by 8 here, which are also its output: it would repeat its input.
    model.model.embed_tokens.weight.data *= 0.05
    model.save_pretrained(directory)
    return {"disable_hybrid_kv_cache_manager": True}


@pytest.mark.parametrize("family", [mistral, gemma2])
def test_windows_and_soft_caps(
    family: Callable[[Path], dict[str, Any]],
    make_engine: Any,
    random_heads: Path,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    options = family(tmp_path) | {"model": str(tmp_path), "tokenizer": str(tiny_model)}
    plain = make_engine(**options)
    medusa = make_engine(
        **options,
        speculative_config={
            "method": "medusa",
            "model": str(random_heads),
            "num_speculative_tokens": harness.MAX_NODES,
        },
    )
    requests = harness.prompts(8, lengths=[2, 23, 40, 70], vocab_size=VOCAB_SIZE)
    for params in (
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True),
    ):
        for shape in ("bushy", "deep", "wide"):
            for hit_rate in harness.HIT_RATES.values():
                topology = harness.TREES[shape]
                drafter = harness.plant(medusa, [topology], VOCAB_SIZE, hit_rate)
                harness.teach(drafter, plain, requests, params)
                expected = harness.answers(plain, requests, params)
                assert harness.answers(medusa, requests, params) == expected
                harness.assert_draft_did_its_part(drafter, topology)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    used = {
        token
        for answer in harness.answers(plain, requests, greedy)
        for token in answer[0].token_ids
    }
    assert len(used) > 30, "the model repeats itself: too dull to test anything"
