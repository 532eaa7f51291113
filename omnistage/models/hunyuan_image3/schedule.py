"""Flow matching as the official code has it: shifted, evenly spaced noise levels and Euler steps.

u runs evenly from 1 to 0; sigma = shift * u / (1 + (shift - 1) * u); the model's time is 1000 * sigma.
"""

from __future__ import annotations

import torch
from torch import Tensor

MODEL_TIME = 1000.0


class Schedule:
    """`sigmas` float32 [steps + 1], from 1 to 0."""

    def __init__(self, steps: int, shift: float) -> None:
        even = torch.linspace(1.0, 0.0, steps + 1)
        self.sigmas = shift * even / (1 + (shift - 1) * even)
        self._times = self.sigmas * MODEL_TIME

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    def time(self, step: int) -> float:
        """Model time of a step; that of the step after the last one is 0."""
        return float(self._times[step])

    def advance(self, step: int, latents: Tensor, velocity: Tensor) -> Tensor:
        """The latents after a step, float32."""
        width = float(self.sigmas[step + 1] - self.sigmas[step])
        return latents.float() + width * velocity

    def expected(self, step: int, latents: Tensor, velocity: Tensor) -> Tensor:
        """The clean latents that `velocity` points to from the latents before a step."""
        return latents.float() - float(self.sigmas[step]) * velocity
