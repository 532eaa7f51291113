"""Pictures and clips as the text encoder's vision tower takes them, without torchvision.

Pictures go through transformers' PIL processor. Clips are resized here, to the sizes of Qwen3-VL's rule, and cut into
patches of (temporal_patch, patch, patch) in merge order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from omnistage.models.minimax_h3.checkpoint import read_json
from omnistage.models.minimax_h3.media import Picture

PatchGrid = tuple[int, int, int]


@dataclass(frozen=True)
class Patches:
    """`values` float32 [patches, 3 * temporal_patch * patch * patch]; `grids` (t, h, w) in patches per medium."""

    values: Tensor
    grids: list[PatchGrid]


@dataclass(frozen=True)
class _ClipRule:
    patch: int
    temporal_patch: int
    merge: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    min_pixels: int
    max_pixels: int


class VisionProcessor:
    """Reads `processor/` of a checkpoint. Raises ConfigError when its files are missing or broken."""

    def __init__(self, folder: Path) -> None:
        picture, clip = read_json(folder / "preprocessor_config.json"), _clip_config(folder)
        self._pictures = Qwen2VLImageProcessorPil.from_dict(picture)
        self._rule = _ClipRule(
            patch=int(clip.get("patch_size", 16)),
            temporal_patch=int(clip.get("temporal_patch_size", 2)),
            merge=int(clip.get("merge_size", 2)),
            mean=tuple(clip.get("image_mean", (0.5,) * 3)),
            std=tuple(clip.get("image_std", (0.5,) * 3)),
            min_pixels=int(clip.get("size", {}).get("shortest_edge", 4096)),
            max_pixels=int(clip.get("size", {}).get("longest_edge", 25165824)),
        )
        self.merge_area = int(self._pictures.merge_size) ** 2
        self.temporal_patch = self._rule.temporal_patch

    def pictures(self, pictures: list[Picture]) -> Patches:
        """Pictures [H, W, 3], each resized to the processor's bounds."""
        images = [Image.fromarray(picture) for picture in pictures]
        features: Any = self._pictures(images=images, return_tensors="pt")
        grids = [(int(t), int(h), int(w)) for t, h, w in features["image_grid_thw"].tolist()]
        return Patches(features["pixel_values"].float(), grids)

    def clip(self, clip: Picture) -> Patches:
        """One clip [T, H, W, 3]; an odd count of frames is made even by repeating the last one."""
        rule = self._rule
        frames = torch.from_numpy(np.ascontiguousarray(clip)).permute(0, 3, 1, 2)
        size = clip_size(len(clip), clip.shape[1], clip.shape[2], rule)
        if size != tuple(clip.shape[1:3]):
            frames = torch.nn.functional.interpolate(
                frames.float(), size, mode="bicubic", align_corners=False, antialias=True
            )
            frames = frames.round().clamp(0, 255)
        pixels = (frames.float() / 255.0 - _channelwise(rule.mean)) / _channelwise(rule.std)
        if len(pixels) % rule.temporal_patch:
            missing = rule.temporal_patch - len(pixels) % rule.temporal_patch
            pixels = torch.cat((pixels, pixels[-1:].expand(missing, -1, -1, -1)))
        return _cut(pixels, rule)


def clip_size(frames: int, height: int, width: int, rule: _ClipRule) -> tuple[int, int]:
    """(height, width): the nearest multiples of patch * merge whose volume keeps to the pixel bounds.

    Formula: transformers 5, `qwen3_vl/video_processing_qwen3_vl.py` (`smart_resize`).
    """
    factor = rule.patch * rule.merge
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    volume = round(frames / rule.temporal_patch) * rule.temporal_patch * high * wide
    if volume > rule.max_pixels:
        shrink = math.sqrt(frames * height * width / rule.max_pixels)
        high = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif volume < rule.min_pixels:
        grow = math.sqrt(rule.min_pixels / (frames * height * width))
        high, wide = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return high, wide


def _cut(pixels: Tensor, rule: _ClipRule) -> Patches:
    """[T, 3, H, W] into rows; the patches of a merge block are neighbours."""
    frames, channels, height, width = pixels.shape
    side, block, depth = rule.patch, rule.merge, rule.temporal_patch
    grid = (frames // depth, height // side, width // side)
    parts = pixels.reshape(grid[0], depth, channels, grid[1] // block, block, side, grid[2] // block, block, side)
    rows = parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * depth * side * side)
    return Patches(rows, [grid])


def _channelwise(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values).view(1, -1, 1, 1)


def _clip_config(folder: Path) -> dict[str, Any]:
    """The published file name, or the one that transformers also writes."""
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            return read_json(folder / name)
    return read_json(folder / "video_preprocessor_config.json")
