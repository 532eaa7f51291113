"""Packed linears: close to the whole ones, the same for every batch, and only where they fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from omnistage.ops.quantize import GROUP, Int4Linear, Int8Linear, group_levels, pack_linears

torch.manual_seed(3)


def linear(out: int = 48, inputs: int = 64, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, out, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
def test_int4_equals_a_product_with_the_dequantised_weight(bias: bool) -> None:
    whole = linear(bias=bias)
    levels, scale, zero = group_levels(whole.weight.detach())
    grouped = levels.view(48, -1, GROUP) - 8
    weight = (grouped * scale.bfloat16().float()[..., None] + zero.bfloat16().float()[..., None]).view(48, 64)
    x = torch.randn(2, 5, 64).bfloat16().float()
    expected = nn.functional.linear(x, weight, whole.bias)
    torch.testing.assert_close(Int4Linear(whole)(x), expected, atol=2e-2, rtol=2e-2)
    assert (weight - whole.weight).abs().max() <= scale.max()


def test_levels_use_all_sixteen_and_keep_the_ends_of_each_group() -> None:
    weight = torch.linspace(-1, 1, GROUP).repeat(16, 1)
    levels, scale, zero = group_levels(weight)
    assert set(levels.flatten().tolist()) == set(range(16))
    ends = (levels[:, [0, -1]] - 8) * scale + zero
    torch.testing.assert_close(ends, weight[:, [0, -1]])


@pytest.mark.parametrize("kind", [Int4Linear, Int8Linear])
def test_a_row_does_not_depend_on_its_batch_mates(kind: type[Int4Linear] | type[Int8Linear]) -> None:
    packed = kind(linear())
    rows = torch.randn(33, 64)
    loud = rows.clone()
    loud[1:] *= 1000
    torch.testing.assert_close(packed(rows)[:1], packed(rows[:1]), atol=0, rtol=0)
    torch.testing.assert_close(packed(loud)[:1], packed(rows[:1]), atol=0, rtol=0)


def test_int8_head_is_close() -> None:
    whole = linear(out=160, bias=False)
    x = torch.randn(4, 64)
    torch.testing.assert_close(Int8Linear(whole)(x), whole(x), atol=3e-2, rtol=3e-2)


def test_linears_are_replaced_in_place_and_misfits_stay() -> None:
    model = nn.ModuleDict(
        {"a": nn.Sequential(linear(), nn.ReLU()), "odd": nn.Linear(20, 48), "narrow": nn.Linear(64, 7)}
    )
    assert pack_linears(model) == 1
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("Int4Linear") == 1
    assert kinds.count("Linear") == 2
