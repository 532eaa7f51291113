"""Where the rows of one document stand: positions, and which of them are noisy.

Row order: vision items (control videos, then the target), sound, actions. Positions are float32 and evaluated in the
order of operations of the published pipeline, so that they are bit-identical to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omnistage.models.cosmos3.ask import Ask


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What the positions depend on, from the transformer's configuration. `margin` separates text and media."""

    patch: int
    temporal: int
    base_fps: float
    sound_fps: float
    modulated: bool
    margin: int
    reset_spatial: bool

    @classmethod
    def of(cls, config: dict[str, Any], temporal: int) -> Grid:
        return cls(
            patch=int(config.get("latent_patch_size", 2)),
            temporal=temporal,
            base_fps=float(config.get("base_fps", 24)),
            sound_fps=float(config.get("sound_latent_fps", 25.0)),
            modulated=bool(config.get("enable_fps_modulation", True)),
            margin=int(config.get("unified_3d_mrope_temporal_modality_margin", 15000)),
            reset_spatial=bool(config.get("unified_3d_mrope_reset_spatial_ids", True)),
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The fixed part of a document. Index tensors are relative to the document's first row.

    `positions` [3, rows]; per vision item its patch grid (T, h, w) and noisy frames; `vision_noisy_rows`, `sound_rows`
    and `action_noisy_rows` are the rows whose predictions are read.
    """

    rows: int
    positions: Tensor
    shapes: list[tuple[int, int, int]]
    noisy_frames: list[Tensor]
    vision_rows: int
    vision_noisy_rows: Tensor
    sound_rows: int
    action_rows: int
    action_noisy: Tensor


def layout_of(ask: Ask, grid: Grid, text_tokens: int, *, controls: int, clean: tuple[int, ...]) -> Layout:
    """The layout of one document: `controls` clean control items before the target, whose frames `clean` are clean."""
    offset = text_tokens + grid.margin
    shape = (
        ask.latent_frames,
        math.ceil(ask.latent_height / grid.patch),
        math.ceil(ask.latent_width / grid.patch),
    )
    item_rows = math.prod(shape)
    noisy = torch.tensor([frame for frame in range(shape[0]) if frame not in clean], dtype=torch.long)
    vision = _positions(shape, offset, grid, fps=ask.fps, factor=grid.temporal)
    parts = [vision] * (controls + 1)
    if ask.sound_latents:
        parts.append(_positions((ask.sound_latents, 1, 1), offset, grid, fps=grid.sound_fps, factor=1))
    actions = ask.action.chunk if ask.action is not None else 0
    if actions:
        parts.append(_action_positions(actions, offset, grid, ask.fps))
    vision_rows = (controls + 1) * item_rows
    first_target = controls * item_rows
    return Layout(
        rows=vision_rows + ask.sound_latents + actions,
        positions=torch.cat(parts, dim=1),
        shapes=[shape] * (controls + 1),
        noisy_frames=[torch.empty(0, dtype=torch.long)] * controls + [noisy],
        vision_rows=vision_rows,
        vision_noisy_rows=first_target + _rows_of(noisy, shape[1] * shape[2]),
        sound_rows=ask.sound_latents,
        action_rows=actions,
        action_noisy=torch.arange(0 if ask.action is None or ask.action.mode == "forward_dynamics" else actions),
    )


def _rows_of(frames: Tensor, per_frame: int) -> Tensor:
    return (frames.unsqueeze(1) * per_frame + torch.arange(per_frame)).flatten()


def _positions(shape: tuple[int, int, int], offset: int, grid: Grid, *, fps: float, factor: int) -> Tensor:
    """[3, rows] of (time, height, width); time runs in units of the base frame rate when there is more than one."""
    frames, height, width = shape
    times = torch.arange(frames, dtype=torch.float32)
    if grid.modulated and frames > 1:
        times = (times + 0) / (fps / factor) * (grid.base_fps / factor) + offset
    else:
        times = times + offset
    spatial = 0 if grid.reset_spatial else offset
    return torch.stack(
        (
            times.view(-1, 1, 1).expand(shape).flatten(),
            (torch.arange(height, dtype=torch.float32) + spatial).view(1, -1, 1).expand(shape).flatten(),
            (torch.arange(width, dtype=torch.float32) + spatial).view(1, 1, -1).expand(shape).flatten(),
        )
    )


def _action_positions(count: int, offset: int, grid: Grid, fps: float) -> Tensor:
    """Actions are transitions: the first one stands at the second frame."""
    times = torch.arange(count, dtype=torch.float32)
    if grid.modulated and count > 1:
        times = (times + 1) / (fps / 1) * (grid.base_fps / grid.temporal) + offset
    else:
        times = times + offset + 1
    spatial = torch.full((count,), 0.0 if grid.reset_spatial else float(offset))
    return torch.stack((times, spatial, spatial))
