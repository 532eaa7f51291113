"""Videos as the reasoner sees them: frames looked at now and then, cut into patches.

The library's own readers need torchvision; these follow the same rules. Only the resizing is Pillow's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as smart_resize_clip
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from omnistage.payload import Array

# Frames per second at which videos are looked at.
_LOOKS_PER_S = 2.0
# The edge model takes frames without a rate for 24 a second, and looks at so many at least and at most.
_EDGE_FPS = 24.0
_EDGE_FRAMES = (4, 768)


@dataclass(frozen=True, slots=True)
class Patches:
    """Of one medium: patches [t * h * w, d], grid (t, h, w), and the seconds of each temporal patch (videos)."""

    pixels: Tensor
    grid: tuple[int, int, int]
    seconds: tuple[float, ...] = ()


class VideoReader:
    """`images` is the checkpoint's image processor; `pixels`: lowest and highest count over all frames of a video."""

    # Axes of (t, frame in t, block row, row in block, y, block column, column in block, x, channel) in a patch's order.
    _AXES = (0, 2, 5, 3, 6, 8, 1, 4, 7)

    def __init__(self, images: Any, pixels: tuple[int, int]) -> None:
        self._images = images
        self._pixels = pixels
        self._merge, self._patch = int(images.merge_size), int(images.patch_size)
        self._span = int(images.temporal_patch_size)

    def __call__(self, frames: Array, fps: float) -> Patches:
        """uint8 [T, H, W, 3] at `fps` (0: not known)."""
        indexes, rate = self._looked_at(len(frames), fps)
        groups = np.array(indexes, np.float64).reshape(-1, self._span) / rate
        pixels, grid = self._patchify(self._resized(frames[indexes]))
        return Patches(pixels, grid, tuple(float(group.mean()) for group in groups[:, [0, -1]]))

    def _looked_at(self, total: int, fps: float) -> tuple[list[int], float]:
        """Frames, a multiple of the temporal patch, and the frame rate; without a rate every frame counts as looked
        at."""
        step = fps / _LOOKS_PER_S if fps else 1.0
        count = max(1, round(total / step))
        indexes = [min(int(index * step), total - 1) for index in range(count)]
        return indexes + indexes[-1:] * (-len(indexes) % self._span), fps or _LOOKS_PER_S

    def _size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        low, high = (limit // frames for limit in self._pixels)
        size: tuple[int, int] = smart_resize(height, width, self._patch * self._merge, max(low, 1), max(high, 1))
        return size

    def _resized(self, frames: Array) -> Array:
        height, width = frames.shape[1:3]
        size = self._size(len(frames), height, width)
        if size == (height, width):
            return frames
        resized = [Image.fromarray(frame).resize(size[::-1], Image.Resampling.BICUBIC) for frame in frames]
        return np.stack([np.asarray(frame) for frame in resized])

    def _patchify(self, frames: Array) -> tuple[Tensor, tuple[int, int, int]]:
        """Rows (time, block row, block column, row, column in block) of values in the order of `_AXES`."""
        mean, std = (np.array(value, np.float32) for value in (self._images.image_mean, self._images.image_std))
        scaled = (frames.astype(np.float32) * self._images.rescale_factor - mean) / std
        span, patch, merge = self._span, self._patch, self._merge
        grid = (len(frames) // span, frames.shape[1] // patch, frames.shape[2] // patch)
        blocks = scaled.reshape(
            grid[0], span, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, 3
        ).transpose(self._AXES)
        return torch.from_numpy(np.ascontiguousarray(blocks.reshape(math.prod(grid), -1))), grid


class EdgeVideoReader(VideoReader):
    """The edge model's: frames spread evenly over the video, patches with the channel last."""

    _AXES = (0, 2, 5, 3, 6, 4, 7, 8, 1)

    def _looked_at(self, total: int, fps: float) -> tuple[list[int], float]:
        rate = fps or _EDGE_FPS
        low, high = _EDGE_FRAMES
        count = min(max(int(total / rate * _LOOKS_PER_S), low), high, total)
        return np.linspace(0, total - 1, count).round().astype(int).tolist(), rate

    def _size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        low, high = self._pixels
        size: tuple[int, int] = smart_resize_clip(
            frames, height, width, self._span, self._patch * self._merge, min_pixels=low, max_pixels=high
        )
        return size
