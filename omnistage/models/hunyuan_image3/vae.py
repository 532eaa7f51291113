"""The checkpoint's three-dimensional convolutional autoencoder, as used for single pictures.

A picture is encoded as `temporal` equal frames; of the decoded frames the last one is the picture. Pixels are [n, 3, H,
W] in -1..1, latents [n, channels, H / spatial, W / spatial]. Blocks change resolution by moving pixels into channels
(order: frame, row, column, channel) beside a parameter-free shortcut that averages or repeats channels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from omnistage.models.hunyuan_image3.checkpoint import Checkpoint

_GROUPS = 32
_EPS = 1e-6
_LOGVAR = (-30.0, 20.0)


class Moments(NamedTuple):
    """Mean and standard deviation of the latents [n, channels, h, w]."""

    mean: Tensor
    std: Tensor


class _Resnet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(_GROUPS, width, eps=_EPS)
        self.conv1 = nn.Conv3d(width, width, 3, padding=1)
        self.norm2 = nn.GroupNorm(_GROUPS, width, eps=_EPS)
        self.conv2 = nn.Conv3d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(functional.silu(self.norm1(x)))
        inner = self.conv2(functional.silu(self.norm2(inner)))
        added: Tensor = x + inner
        return added


class _Attention(nn.Module):
    """One head over all positions of all frames."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_GROUPS, width, eps=_EPS)
        self.q, self.k, self.v, self.proj_out = (nn.Conv3d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (part(normed).flatten(2).transpose(1, 2)[:, None] for part in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v)[:, 0]
        out: Tensor = self.proj_out(attended.transpose(1, 2).reshape(x.shape))
        return x + out


class _Middle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block_1, self.attn_1, self.block_2 = _Resnet(width), _Attention(width), _Resnet(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block_2(self.attn_1(self.block_1(x)))
        return out


class _Downsample(nn.Module):
    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        self._factors = (time, 2, 2)
        factor = 4 * time
        self._mean = factor * width // out
        self.conv = nn.Conv3d(width, out // factor, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return _to_channels(self.conv(x), self._factors) + _averaged(_to_channels(x, self._factors), self._mean)


class _Upsample(nn.Module):
    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        self._factors = (time, 2, 2)
        factor = 4 * time
        self._repeat = factor * out // width
        self.conv = nn.Conv3d(width, out * factor, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x.repeat_interleave(self._repeat, dim=1)
        return _from_channels(self.conv(x), self._factors) + _from_channels(shortcut, self._factors)


class _Level(nn.Module):
    """Residual blocks at one width and the change to the next."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.block = nn.ModuleList([_Resnet(width) for _ in range(blocks)])
        self.downsample: nn.Module | None = None
        self.upsample: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        for change in (self.downsample, self.upsample):
            x = x if change is None else change(x)
        return x


class Encoder(nn.Module):
    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        widths, blocks = _widths(checkpoint)
        channels = checkpoint.latent_channels
        deep, shallow = int(math.log2(checkpoint.spatial)), int(math.log2(checkpoint.spatial // checkpoint.temporal))
        self._frames = checkpoint.temporal
        self._mean = widths[-1] // (2 * channels)
        self.conv_in = nn.Conv3d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList([_Level(width, blocks) for width in widths])
        for index in range(deep):
            level = self.down[index]
            level.downsample = _Downsample(widths[index], widths[index + 1], 2 if index >= shallow else 1)
        self.mid = _Middle(widths[-1])
        self.norm_out = nn.GroupNorm(_GROUPS, widths[-1], eps=_EPS)
        self.conv_out = nn.Conv3d(widths[-1], 2 * channels, 3, padding=1)

    def forward(self, pixels: Tensor) -> Moments:
        hidden = self.conv_in(pixels[:, :, None].expand(-1, -1, self._frames, -1, -1))
        for level in self.down:
            hidden = level(hidden)
        hidden = self.mid(hidden)
        moments = self.conv_out(functional.silu(self.norm_out(hidden))) + _averaged(hidden, self._mean)
        mean, logvar = moments[:, :, 0].float().chunk(2, dim=1)
        return Moments(mean, torch.exp(0.5 * logvar.clamp(*_LOGVAR)))


class Decoder(nn.Module):
    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        widths, blocks = _widths(checkpoint)
        widths = widths[::-1]
        self._repeat = widths[0] // checkpoint.latent_channels
        deep, timely = int(math.log2(checkpoint.spatial)), int(math.log2(checkpoint.temporal))
        self.conv_in = nn.Conv3d(checkpoint.latent_channels, widths[0], 3, padding=1)
        self.mid = _Middle(widths[0])
        self.up = nn.ModuleList([_Level(width, blocks + 1) for width in widths])
        for index in range(deep):
            level = self.up[index]
            level.upsample = _Upsample(widths[index], widths[index + 1], 2 if index < timely else 1)
        self.norm_out = nn.GroupNorm(_GROUPS, widths[-1], eps=_EPS)
        self.conv_out = nn.Conv3d(widths[-1], 3, 3, padding=1)

    def frames(self, latents: Tensor) -> Tensor:
        """All decoded frames [n, 3, temporal, H, W]."""
        lifted = latents[:, :, None]
        hidden = self.conv_in(lifted) + lifted.repeat_interleave(self._repeat, dim=1)
        hidden = self.mid(hidden)
        for level in self.up:
            hidden = level(hidden)
        frames: Tensor = self.conv_out(functional.silu(self.norm_out(hidden)))
        return frames

    def forward(self, latents: Tensor) -> Tensor:
        return self.frames(latents)[:, :, -1]


def _widths(checkpoint: Checkpoint) -> tuple[list[int], int]:
    """Channels of each level from the pixels on, and residual blocks per level."""
    return [int(width) for width in checkpoint.vae["block_out_channels"]], int(checkpoint.vae["layers_per_block"])


def _averaged(x: Tensor, count: int) -> Tensor:
    """Means over groups of `count` consecutive channels."""
    n, c, *sides = x.shape
    return x.view(n, c // count, count, *sides).mean(dim=2)


def _to_channels(x: Tensor, factors: tuple[int, int, int]) -> Tensor:
    """[n, c, t, h, w] -> [n, rt * rh * rw * c, t / rt, h / rh, w / rw]."""
    n, c, t, h, w = x.shape
    rt, rh, rw = factors
    split = x.view(n, c, t // rt, rt, h // rh, rh, w // rw, rw)
    return split.permute(0, 3, 5, 7, 1, 2, 4, 6).reshape(n, -1, t // rt, h // rh, w // rw)


def _from_channels(x: Tensor, factors: tuple[int, int, int]) -> Tensor:
    """The inverse of `_to_channels`."""
    n, _, t, h, w = x.shape
    rt, rh, rw = factors
    split = x.view(n, rt, rh, rw, -1, t, h, w)
    return split.permute(0, 4, 5, 1, 6, 2, 7, 3).reshape(n, -1, t * rt, h * rh, w * rw)
