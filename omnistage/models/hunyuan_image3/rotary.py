"""Two-dimensional rotary positions in a one-dimensional sequence.

Every token has a pair (y, x). For text both are its index. A grid of height h and width w that starts at index L is
centred on the length that it takes: y = trunc(L + (w*h - h)/2 + i), x = trunc(L + (w*h - w)/2 + j). Even frequencies
turn by y, odd ones by x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omnistage.models.hunyuan_image3.layout import GridSpan

Angles = tuple[Tensor, Tensor]


def positions(grids: Sequence[GridSpan], start: int, stop: int) -> Tensor:
    """(y, x) of tokens `start..stop`, int64 [stop - start, 2]. Tokens of a span beyond its grid count as text."""
    pairs = torch.arange(start, stop)[:, None].repeat(1, 2)
    for span in grids:
        filled = span.height * span.width
        first, last = max(span.start, start), min(span.start + filled, stop)
        if first >= last:
            continue
        inside = torch.arange(first, last) - span.start
        y = span.start + (filled - span.height) / 2 + (inside // span.width).double()
        x = span.start + (filled - span.width) / 2 + (inside % span.width).double()
        pairs[first - start : last - start] = torch.stack((y, x), dim=1).trunc().long()
    return pairs


class Rotary:
    """Cosines and sines for pairs of positions, float32."""

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        self._frequencies = 1.0 / (theta**exponent)
        self._by_x = torch.arange(head_dim // 2, device=device) % 2
        self._device = device

    def __call__(self, pairs: Tensor) -> Angles:
        """Cosines and sines [n, head_dim] of pairs [n, 2]."""
        chosen = pairs.to(self._device, torch.float32)[:, self._by_x]
        angles = (chosen * self._frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()
