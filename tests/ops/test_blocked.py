"""Blocked linears: close to the plain ones, and only where they can be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from omnistage.errors import ConfigError
from omnistage.ops.blocked import (
    BlockedConv1d,
    BlockedConvTranspose1d,
    BlockedLinear,
    block_convolutions,
    block_linear,
    block_linears,
    choose_layout,
    parameter_bytes,
)
from omnistage.ops.layout_rule import LayoutName, physical_memory

torch.manual_seed(4)


@pytest.mark.parametrize("keep_plain", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 64), (1, 9, 64), (3, 5, 64), (0, 64)])
def test_close_to_the_plain_layer_for_any_shape(shape: tuple[int, ...], bias: bool, keep_plain: bool) -> None:
    plain = nn.Linear(64, 40, bias=bias)
    x = torch.randn(shape)
    made = BlockedLinear(plain, keep_plain=keep_plain)(x)
    torch.testing.assert_close(made, plain(x), atol=1e-5, rtol=1e-5)


def test_a_strided_input_is_read_right() -> None:
    plain = nn.Linear(64, 40)
    x = torch.randn(2, 64, 7).transpose(1, 2)
    torch.testing.assert_close(BlockedLinear(plain, keep_plain=False)(x), plain(x), atol=1e-5, rtol=1e-5)


def test_few_rows_take_plain_weights_that_are_kept() -> None:
    plain = nn.Linear(64, 40)
    few = torch.randn(3, 64)
    assert torch.equal(BlockedLinear(plain, keep_plain=True)(few), plain(few))


def test_layers_are_replaced_in_place_and_once() -> None:
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "b": nn.Linear(8, 4), "c": nn.Embedding(3, 8)}
    )
    assert block_linears(model, "plain") == 0
    assert block_linears(model, "both") == 2
    assert block_linears(model, "both") == 0
    assert isinstance(model["b"], BlockedLinear)


def test_plain_head_is_itself() -> None:
    head = nn.Linear(8, 4)
    assert block_linear(head, "plain") is head
    assert isinstance(block_linear(head, "blocked"), BlockedLinear)


@pytest.mark.parametrize(("share", "expected"), [(16, "both"), (15, "blocked")])
def test_weights_are_held_twice_while_they_are_small(share: int, expected: LayoutName) -> None:
    model = nn.Linear(32, 32)
    assert choose_layout("auto", model, parameter_bytes(model) * share) == expected


def test_other_types_stay_plain_and_a_demand_is_refused() -> None:
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    assert choose_layout("auto", model) == "plain"
    assert choose_layout("plain", model) == "plain"
    with pytest.raises(ConfigError, match="float32 on a CPU"):
        choose_layout("blocked", model)
    assert choose_layout("blocked", nn.Linear(8, 8)) == "blocked"


def test_memory_of_the_machine_is_counted_in_bytes() -> None:
    assert 2**28 < physical_memory() < 2**50


@pytest.mark.parametrize("length", [7, 30, 300])
@pytest.mark.parametrize(("kernel", "dilation", "padding"), [(7, 1, 0), (7, 9, 27), (3, 2, 0)])
def test_a_blocked_convolution_is_close_for_any_length(kernel: int, dilation: int, padding: int, length: int) -> None:
    plain = nn.Conv1d(24, 40, kernel, dilation=dilation, padding=padding)
    x = torch.randn(2, 24, length + (kernel - 1) * dilation)
    torch.testing.assert_close(BlockedConv1d(plain)(x), plain(x), atol=1e-5, rtol=1e-5)


def test_groups_of_a_blocked_convolution_stay_apart() -> None:
    plain = nn.Conv1d(32, 32, 5, groups=4)
    x = torch.randn(1, 32, 50)
    torch.testing.assert_close(BlockedConv1d(plain)(x), plain(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (16, 8), (6, 2), (3, 1)])
def test_a_blocked_transposed_convolution_is_close(kernel: int, stride: int, bias: bool) -> None:
    plain = nn.ConvTranspose1d(24, 40, kernel, stride, bias=bias)
    for length in (1, 2, 33):
        x = torch.randn(2, 24, length)
        torch.testing.assert_close(BlockedConvTranspose1d(plain)(x), plain(x), atol=1e-5, rtol=1e-5)


def test_convolutions_that_gain_nothing_stay() -> None:
    layers = [
        nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 3, groups=8), nn.Conv1d(8, 1, 3), nn.ConvTranspose1d(8, 8, 3, 2),
        nn.ConvTranspose1d(8, 8, 4, 2, padding=1), nn.Conv1d(8, 4, 3),
    ]  # fmt: skip
    model = nn.Sequential(*layers)
    assert block_convolutions(model, "plain") == 0
    assert block_convolutions(model, "blocked") == 1
    assert block_convolutions(model, "blocked") == 0
