"""How far rounding moves the scores of the tiny model in a text.

Its weights are large, so after some hundred tokens float32 itself can be off by more than what two
engines usually differ by, and ten times more at one token than at the next. Transformers' float32
model is compared with the same in float64, rounded once as it is, and a few times with one more
rounding at random after every product with a matrix: engines sum in orders of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

_SAMPLES = 8
_UNIT_ROUNDOFF = 2.0**-24


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
        exact, rounded = self._models
        tokens = torch.tensor([list(text)])
        right = exact(tokens).logits
        found = [rounded(tokens).logits]
        at_random = torch.Generator().manual_seed(0)

        def round_again(module: torch.nn.Module, given: object, out: torch.Tensor) -> torch.Tensor:
            return out * (1 + _UNIT_ROUNDOFF * torch.randn(out.shape, generator=at_random))

        hooks = [
            module.register_forward_hook(round_again)
            for module in rounded.modules()
            if isinstance(module, torch.nn.Linear)
        ]
        found += [rounded(tokens).logits for _ in range(_SAMPLES)]
        for hook in hooks:
            hook.remove()
        return max(float((right - logits.double()).abs().max()) for logits in found)
