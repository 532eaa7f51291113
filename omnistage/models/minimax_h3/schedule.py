"""The sigma schedule and its Euler step: arithmetic without state.

Formulas: diffusers 0.42, `schedulers/scheduling_minimax_h3.py`. Time t = 1 - sigma, t = 1 is clean data.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Visual conditions are held at this time, very slightly noised.
CONDITION_TIME = 0.999


def sigmas(points: int, shift: float) -> Tensor:
    """float32 [n], n <= points: from 1 down to exactly 0, neighbours that fall together merged. n - 1 model calls."""
    base = torch.linspace(1.0, 0.0, points, dtype=torch.float32)
    shifted: Tensor = shift * base / (1 + (shift - 1) * base)
    merged: Tensor = torch.unique_consecutive(shifted)
    return merged


def step(rows: Tensor, velocity: Tensor, schedule: Tensor, index: int) -> Tensor:
    """The rows one step on; `velocity` points towards the data. float32, any shape.

    The sigma of the estimate is the rounded 1 - (1 - sigma) that the model was told, as in the formulas.
    """
    time = 1.0 - schedule[index]
    clean = rows + (1 - time) * velocity
    ratio = schedule[index + 1] / schedule[index]
    return ratio * rows + (1.0 - ratio) * clean


def noised_condition(clean: Tensor, noise: Tensor) -> Tensor:
    """A visual condition at `CONDITION_TIME`; same shapes, float32."""
    time = torch.tensor(CONDITION_TIME, dtype=clean.dtype, device=clean.device)
    return time * clean + (1.0 - time) * noise
