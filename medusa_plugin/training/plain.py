"""Plain Medusa heads while they are trained: served by `MedusaHeads`, from one residual block."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from medusa_plugin.atomic_file import write_whole
from medusa_plugin.heads.base import TargetSpec
from medusa_plugin.heads.files import CONFIG_FILE, DRAFT_VOCAB_FILE, DRAFT_VOCAB_KEY, write_tensors
from medusa_plugin.heads.medusa import HeadWeights, MedusaHeads
from medusa_plugin.heads.source import MEDUSA_FILES
from medusa_plugin.training.examples import InputStatistics


class PlainHeads(nn.Module):
    """x + SiLU(W (x - mean) / std + b), then the target's lm head; W and b start from 0.

    Standardising is only how the weights are learnt; it is folded into those that are saved.

    Args:
        num_heads: of them.
        target: gives the lm head.
        draft_vocab: int64 `[n]`, tokens that count.
        inputs: of the hidden states.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    lm_head: torch.Tensor

    def __init__(
        self,
        num_heads: int,
        target: TargetSpec,
        draft_vocab: torch.Tensor,
        inputs: InputStatistics,
    ) -> None:
        super().__init__()
        width = target.hidden_size
        self.num_heads = num_heads
        self.weight = nn.Parameter(torch.zeros(num_heads, width, width))
        self.bias = nn.Parameter(torch.zeros(num_heads, width))
        self.register_buffer("mean", inputs.mean)
        self.register_buffer("scale", 1 / inputs.std)
        kept = target.lm_head.index_select(0, draft_vocab).float()
        self.register_buffer("lm_head", kept, persistent=False)

    def folded(self) -> HeadWeights:
        """The weights as they are served."""
        weight = self.weight * self.scale
        bias = self.bias - torch.einsum("hoi,i->ho", weight, self.mean)
        return HeadWeights(self.num_heads, (weight,), (bias,), None)

    def all_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 `[num_heads, batch, draft vocabulary]`; `token_ids` is not looked at."""
        return MedusaHeads(self.folded(), self.lm_head, None, columns=None).logits(hidden)


def save_plain(
    directory: Path, heads: PlainHeads, draft_vocab: torch.Tensor, dtype: torch.dtype
) -> None:
    """Write heads to `directory`, which is made, in the format of public Medusa checkpoints.

    Args:
        directory: where to.
        heads: trained ones.
        draft_vocab: int64 `[n]`, most frequent first.
        dtype: of the weights in the file.
    """
    folded = heads.folded()
    tensors = {}
    for head in range(heads.num_heads):
        tensors[f"{head}.0.linear.weight"] = folded.weights[0][head]
        tensors[f"{head}.0.linear.bias"] = folded.biases[0][head]
    plain = {key: tensor.detach().to("cpu", dtype).contiguous() for key, tensor in tensors.items()}
    write_tensors(plain, directory / MEDUSA_FILES[0])
    ranked = {DRAFT_VOCAB_KEY: draft_vocab.to("cpu", torch.int32).contiguous()}
    write_tensors(ranked, directory / DRAFT_VOCAB_FILE)
    config = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": 1, "version": "2"}
    write_whole(directory / CONFIG_FILE, json.dumps(config, indent=1) + "\n")
