"""Packed linear layers against plain ones, and that packing really happens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from medusa_plugin.heads import packed
from medusa_plugin.heads.packed import PackedLinear, can_pack, pack_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 33])
def test_the_product_is_that_of_a_plain_layer(
    dtype: torch.dtype, has_bias: bool, rows: int
) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(70, 37)
    bias = torch.randn(70) if has_bias else None
    x = torch.randn(rows, 37)
    layer = PackedLinear(weight.to(dtype), None if bias is None else bias.to(dtype))
    found = layer(x.to(dtype))
    assert found.dtype == dtype and found.shape == (rows, 70)
    expected = F.linear(
        x.to(dtype).float(),
        weight.to(dtype).float(),
        None if bias is None else bias.to(dtype).float(),
    )
    tolerance = 1e-4 if dtype == torch.float32 else 0.08
    assert torch.allclose(found.float(), expected, atol=tolerance)


def test_all_layers_of_a_module_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = nn.Sequential(nn.Linear(5, 6), nn.SiLU())
    module = nn.Sequential(nn.Linear(4, 5, bias=False), inner).to(torch.bfloat16)
    x = torch.randn(3, 4).bfloat16()
    before = module(x)
    pack_linears(module)
    kinds = [type(layer) for layer in module.modules()]
    assert nn.Linear not in kinds and kinds.count(PackedLinear) == 2
    assert torch.allclose(module(x).float(), before.float(), atol=0.02)


def test_packing_happens_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(8, 8).bfloat16()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert not can_pack(weight)
        return
    assert can_pack(weight) and not can_pack(weight.float())
    assert PackedLinear(weight)._weight.is_mkldnn
    monkeypatch.setattr(packed, "can_pack", lambda weight: False)
    assert torch.equal(PackedLinear(weight)(weight), F.linear(weight, weight))
