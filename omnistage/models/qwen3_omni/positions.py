"""Three-axis rotary positions of a sequence (M-RoPE)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Positions:
    """`prompt` [3, n] for the prompt's rows; a later row r has position r + `delta` on all axes."""

    prompt: Tensor
    delta: int

    @classmethod
    def plain(cls, count: int) -> Positions:
        """Those of a prompt of `count` rows without pictures."""
        return cls(torch.arange(count, dtype=torch.float32).expand(3, -1), 0)

    def of(self, start: int, stop: int) -> Tensor:
        """[3, stop - start]"""
        count = self.prompt.shape[1]
        if stop <= count:
            return self.prompt[:, start:stop]
        later = torch.arange(max(start, count), stop, dtype=torch.float32) + self.delta
        return torch.cat((self.prompt[:, start:], later.expand(3, -1)), dim=1)
