"""Our heads in the layout of vLLM 0.32's own chain Medusa, so that it can be measured with them.

vLLM 0.32 (`vllm/model_executor/models/medusa.py`) takes `blocks.H.layers.L.{weight,bias}` and
either one language-model head for all heads (`original_lm_head`), over a part of the vocabulary if
`token_map` is there, or one per head over all of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from medusa_plugin.heads import AUTO_DRAFT_VOCAB_SIZE, HeadsError, TargetSpec, peek_heads
from medusa_plugin.heads.draft_vocab import read_draft_vocab
from medusa_plugin.heads.medusa import HeadWeights
from medusa_plugin.heads.medusa_checkpoint import MedusaVariant

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
LM_HEAD_NAMES = ("lm_head.weight", "model.embed_tokens.weight")


def export_chain_heads(heads: Path, model: Path, directory: Path) -> int:
    """Write the heads in `heads` for `model` to `directory`, which must exist.

    They draft from the same vocabulary as ours do by default: the 4096 most frequent tokens where
    the heads rank them, otherwise all.

    Returns:
        The number of heads, which is the longest chain.

    Raises:
        HeadsError: the heads cannot be read, do not fit `model`, or the model has no plain
            language-model head.
    """
    info = peek_heads(heads)
    if not isinstance(info.variant, MedusaVariant):
        raise HeadsError(f"{info.path}: vLLM's chain runs plain Medusa heads, not {info.kind} ones")
    lm_head = _lm_head(model)
    vocab_size, hidden_size = lm_head.shape
    info.require_target(hidden_size=hidden_size, vocab_size=vocab_size)
    target = TargetSpec(hidden_size, vocab_size, lm_head, lm_head.dtype, torch.device("cpu"))
    token_map = None
    if info.draft_vocab_ranked and not info.variant.owns_lm_head:  # vLLM cannot cut own heads down
        token_map = read_draft_vocab(heads, vocab_size)[:AUTO_DRAFT_VOCAB_SIZE]
    weights = info.variant.read_weights(target)
    save_file(chain_tensors(weights, lm_head, token_map), directory / WEIGHTS_FILE)
    config = chain_config(info.variant, vocab_size, None if token_map is None else len(token_map))
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")
    return info.num_heads


def chain_tensors(
    weights: HeadWeights, lm_head: torch.Tensor, token_map: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Tensors under vLLM's names.

    Args:
        weights: of the heads.
        lm_head: `[vocab_size, hidden_size]` of the target.
        token_map: int64 `[n]`, tokens that may be drafted; None for all.
    """
    tensors = {}
    for head in range(weights.num_heads):
        for layer, weight in enumerate(weights.weights):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = weight[head].clone()
        for layer, bias in enumerate(weights.biases):
            tensors[f"blocks.{head}.layers.{layer}.bias"] = bias[head].clone()
        if weights.lm_heads is not None:
            tensors[f"lm_heads.{head}.weight"] = weights.lm_heads[head].clone()
    if weights.lm_heads is None:
        # Under this name vLLM takes it for the one head that all share.
        tensors["lm_heads.0.weight"] = lm_head.clone() if token_map is None else lm_head[token_map]
    if token_map is not None:
        tensors["token_map"] = token_map.clone()
    return tensors


def chain_config(
    variant: MedusaVariant, vocab_size: int, truncated_vocab_size: int | None
) -> dict[str, object]:
    """config.json of vLLM's `MedusaConfig`."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": variant.hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": truncated_vocab_size or vocab_size,
        "num_heads": variant.num_heads,
        "num_hidden_layers": variant.num_layers,
        "medusa_fc_bias": variant.has_bias,
        "original_lm_head": not variant.owns_lm_head,
    }


def _lm_head(model: Path) -> torch.Tensor:
    """Output embedding of a checkpoint in one or several safetensors files."""
    files = sorted(model.glob("*.safetensors"))
    for name in LM_HEAD_NAMES:  # a tied model has the embedding only
        for file in files:
            with safe_open(file, framework="pt") as opened:
                if name in opened.keys():  # noqa: SIM118 (not a mapping)
                    return opened.get_tensor(name)
    raise HeadsError(f"{model}: no {' or '.join(LM_HEAD_NAMES)} in its safetensors files")
