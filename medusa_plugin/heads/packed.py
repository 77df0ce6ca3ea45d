"""Linear layers of heads for few rows at a time.

torch's own bfloat16 product on CPUs lays the weights out anew in every call, which for the few rows
of a draft costs more than the product. Here they are laid out once, as torch.compile does it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

_OPS = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
"""torch's own, which a build without oneDNN lacks."""
_ROWS = 8
"""What the layout is chosen for; any number of rows is right."""


def can_pack(weight: torch.Tensor) -> bool:
    """Whether `weight` can be laid out once."""
    mkldnn = torch.ops.mkldnn
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and all(hasattr(mkldnn, name) for name in _OPS)
        and mkldnn._is_mkldnn_bf16_supported()
    )


class PackedLinear(nn.Module):
    """y = x W^T + b for inference.

    Args:
        weight: `[outputs, inputs]`; the packed copy replaces it.
        bias: `[outputs]` or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self._is_packed = can_pack(weight)
        # Not parameters: a packed tensor cannot be copied, moved or saved.
        self._weight = weight.detach()
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, _ROWS)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., outputs]` of `[..., inputs]`."""
        if not self._is_packed:
            return F.linear(x, self._weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product


def pack_linears(module: nn.Module) -> None:
    """Replace every `nn.Linear` inside `module` by its packed form, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack_linears(child)
