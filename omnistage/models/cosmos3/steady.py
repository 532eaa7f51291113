"""Layers whose result for a row does not depend, on a CPU, on how many rows came with it or on where it stands.

Two things make a request differ between running alone and in a batch: matrix products of a handful of rows take kernels
that round differently (from `MIN_ROWS` rows on they agree), and SiLU rounds differently at the end of its buffer, where
the vector loop hands over to a scalar one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

MIN_ROWS = 32
# Covers the unrolled loops of 512-bit vectors over 32-bit and 16-bit numbers.
_VECTOR = 64


class SteadyLinear(nn.Module):
    """`linear` over [rows, in], computed on at least `MIN_ROWS` rows. No rows stay no rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, rows: Tensor) -> Tensor:
        missing = MIN_ROWS - len(rows)
        if missing <= 0 or missing == MIN_ROWS:
            output: Tensor = self.linear(rows)
            return output
        padded: Tensor = self.linear(functional.pad(rows, (0, 0, 0, missing)))
        return padded[: len(rows)]


class SteadySiLU(nn.Module):
    """SiLU on a buffer that every thread's vector loop covers without a rest (a multiple of `_VECTOR` each)."""

    def forward(self, rows: Tensor) -> Tensor:
        rest = -rows.numel() % (_VECTOR * torch.get_num_threads())
        if rest == 0:
            return functional.silu(rows)
        padded = functional.pad(rows.reshape(-1), (0, rest))
        return functional.silu(padded)[: rows.numel()].view(rows.shape)


def make_steady(module: nn.Module) -> None:
    """Replaces every `nn.Linear` (which must see [rows, features] only) and `nn.SiLU` below `module`."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, SteadyLinear(child))
        elif isinstance(child, nn.SiLU):
            setattr(module, name, SteadySiLU())
        else:
            make_steady(child)
