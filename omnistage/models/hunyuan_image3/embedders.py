"""What turns latents and times into rows of the backbone, and rows into velocities.

Latents are [n, channels, h, w]; their rows are [n, h * w, hidden], row-major. Residual blocks are those of ADM
(arXiv:2105.05233), scaled and shifted by a time embedding; GroupNorm has 32 groups.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from omnistage.models.hunyuan_image3.checkpoint import Checkpoint

_GROUPS = 32
_SINUSOID = 256
_LONGEST = 10000.0


def sinusoid(times: Tensor) -> Tensor:
    """[n, 256] of times in 0..1000 [n]: cosines, then sines, in float32."""
    half = _SINUSOID // 2
    falling = torch.arange(half, dtype=torch.float32, device=times.device)
    angles = times.float()[:, None] * torch.exp(-math.log(_LONGEST) * falling / half)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


class TimeEmbedder(nn.Module):
    """One row [hidden] per time."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(_SINUSOID, hidden), nn.GELU(), nn.Linear(hidden, hidden))

    def forward(self, times: Tensor) -> Tensor:
        weight = self.mlp.get_parameter("0.weight")
        rows: Tensor = self.mlp(sinusoid(times.to(weight.device)).to(weight.dtype))
        return rows


class ResBlock(nn.Module):
    """skip(x) + conv(silu(norm(conv(silu(norm(x)))) * (1 + scale) + shift)); scale and shift come from the time."""

    def __init__(self, channels: int, out: int, hidden: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(_GROUPS, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * out))
        # The third place is that of a dropout, which has no weights.
        self.out_layers = nn.Sequential(
            nn.GroupNorm(_GROUPS, out), nn.SiLU(), nn.Identity(), nn.Conv2d(out, out, 3, padding=1)
        )
        self.skip_connection = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x [n, channels, h, w], time [n, hidden] -> [n, out, h, w]."""
        scale, shift = self.emb_layers(time)[:, :, None, None].chunk(2, dim=1)
        norm, *rest = self.out_layers
        inner: Tensor = norm(self.in_layers(x)) * (1 + scale) + shift
        for layer in rest:
            inner = layer(inner)
        skipped: Tensor = self.skip_connection(x)
        return skipped + inner


class PatchEmbed(nn.Module):
    """Latents to rows."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        middle = checkpoint.patch_hidden
        self.model = nn.ModuleList(
            [
                nn.Conv2d(checkpoint.latent_channels, middle, 3, padding=1),
                ResBlock(middle, checkpoint.hidden, checkpoint.hidden),
            ]
        )

    def forward(self, latents: Tensor, time: Tensor) -> Tensor:
        convolution, block = self.model
        rows: Tensor = block(convolution(latents), time)
        return rows.flatten(2).transpose(1, 2)


class FinalLayer(nn.Module):
    """Rows to velocities."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        middle = checkpoint.patch_hidden
        self.model = nn.ModuleList(
            [
                ResBlock(checkpoint.hidden, middle, checkpoint.hidden),
                nn.Sequential(
                    nn.GroupNorm(_GROUPS, middle),
                    nn.SiLU(),
                    nn.Conv2d(middle, checkpoint.latent_channels, 3, padding=1),
                ),
            ]
        )

    def forward(self, rows: Tensor, time: Tensor, grid: tuple[int, int]) -> Tensor:
        """rows [n, h * w, hidden], time [n, hidden] -> [n, channels, h, w]."""
        block, head = self.model
        n, _, channels = rows.shape
        velocity: Tensor = head(block(rows.transpose(1, 2).reshape(n, channels, *grid), time))
        return velocity
