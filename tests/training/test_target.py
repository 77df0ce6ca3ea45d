"""The target outside vLLM: the families of decoders whose states and heads have to fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_plugin.training.target import Target
from medusa_plugin.training.texts import Text, TrainingError

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window": 8}),
}


def make(family: str, folder: Path) -> Any:
    """A random model of a family, also written to `folder`."""
    import transformers

    name, options = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**COMMON, **options)).float().eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_heads_of_a_family_fit_its_states(family: str, tmp_path: Path) -> None:
    """Of texts of different lengths together, the states give the model's own logits."""
    model = make(family, tmp_path)
    target = Target(str(tmp_path), torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    texts = []
    for length in (30, 9, 21):
        ids = torch.randint(1, 64, (length,), generator=generator).tolist()
        texts.append(Text(tuple(ids), ((1, 4), (6, length))))
    spec = target.spec()
    assert spec.embedding is not None and spec.embedding.shape == spec.lm_head.shape == (64, 32)
    for text, hidden in zip(texts, target.hidden_states(texts), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([text.token_ids])).logits[0]
        rows = [row for start, stop in text.answers for row in range(start - 1, stop - 1)]
        torch.testing.assert_close(hidden @ spec.lm_head.T, logits[rows], rtol=1e-3, atol=1e-4)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="nowhere"):
        Target(str(tmp_path / "nowhere"), torch.float32, torch.device("cpu"))
