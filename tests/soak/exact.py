"""How far rounding moves the scores of the tiny model in a text.

Its weights are large, so after some hundred tokens float32 itself can be off by more than what two
engines usually differ by: transformers' float32 model is compared with the same in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


class ExactModel:
    """The model of the fuzzer's engines, in float64 and in float32.

    Args:
        directory: where it is.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import LlamaForCausalLM

        self._models = [
            LlamaForCausalLM.from_pretrained(directory, dtype=dtype)
            for dtype in (torch.float64, torch.float32)
        ]

    @torch.inference_mode()
    def rounding(self, text: Sequence[int]) -> float:
        """The largest error of a float32 logit anywhere in `text`: what is cached carries it on."""
        right, rounded = (
            model(torch.tensor([list(text)])).logits[0].double() for model in self._models
        )
        return float((right - rounded).abs().max())
