"""Layers that do not mind how many rows they get."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from omnistage.models.cosmos3.steady import MIN_ROWS, SteadyLinear, SteadySiLU, make_steady


@pytest.mark.parametrize("rows", [0, 1, 2, 15, MIN_ROWS - 1, MIN_ROWS, MIN_ROWS + 1])
def test_few_rows_are_computed_among_enough_and_come_back_alone(rows: int) -> None:
    seen: list[int] = []
    linear = nn.Linear(7, 5)
    linear.register_forward_hook(lambda _module, inputs, _output: seen.append(len(inputs[0])))
    given = torch.randn(rows, 7)
    got = SteadyLinear(linear)(given)
    assert got.shape == (rows, 5)
    assert seen == [0 if rows == 0 else max(rows, MIN_ROWS)]
    torch.testing.assert_close(got, given @ linear.weight.T + linear.bias, atol=1e-6, rtol=0)


def test_silu_gives_a_row_the_same_bits_wherever_it_stands() -> None:
    rows = 3 * torch.randn(301, 20, generator=torch.Generator().manual_seed(1))
    whole = SteadySiLU()(rows)
    torch.testing.assert_close(whole, nn.functional.silu(rows), atol=1e-6, rtol=0)
    for start in range(0, 290, 7):
        part = rows[start : start + 1 + start % 11]
        assert torch.equal(SteadySiLU()(part), whole[start : start + len(part)])


def test_every_linear_and_silu_of_a_module_is_replaced_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.SiLU(), nn.Linear(4, 2)))
    make_steady(model)
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("SteadyLinear") == kinds.count("Linear") == 2
    assert (kinds.count("SteadySiLU"), kinds.count("SiLU")) == (1, 0)
    assert model(torch.ones(1, 4)).shape == (1, 2)
