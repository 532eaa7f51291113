"""The packed sequence of one request: which row is what, and where it lies in time and space. Torch-free.

Row order: text | conditions | target audio | target video. Conditions are keyframes (first, last) or references in the
client's order, the sound of a video right before its pictures. Positions are float64 (t, h, w); one audio latent is one
unit of time, so a video frame is 5/3. Formulas: diffusers 0.42, `modular_pipelines/minimax_h3/before_denoise.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from omnistage.models.minimax_h3.ask import Ask
from omnistage.models.minimax_h3.geometry import STEREO

Positions = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

VIDEO_TAG, TEXT_TAG, AUDIO_TAG = 0, 1, 2
# Noise levels that rows can have; `Layout.levels` holds one per row.
TARGET_VIDEO, TARGET_AUDIO, CONDITION_VIDEO, CONDITION_AUDIO = range(4)
_FRAME_UNITS = 5.0 / 3.0
_FRAMES_PER_LATENT = (1, 4, 4, 4, 4)
_SPACE_UNITS = 32


class LatentSize(NamedTuple):
    frames: int
    height: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Rows of one request. `positions` [S, 3]; `tags`, `levels` [S]; `video`, `audio`: row numbers, conditions first.

    `text_rows` lead the sequence; `condition_*_rows` count the conditions among the video and audio rows.
    """

    positions: Positions
    tags: Index
    levels: Index
    video: Index
    audio: Index
    text_rows: int
    condition_video_rows: int
    condition_audio_rows: int

    @property
    def rows(self) -> int:
        return len(self.tags)


def rows_of(ask: Ask, patch: tuple[int, int, int], text_rows: int) -> int:
    """Rows of the packed sequence without its conditions."""
    frame = (ask.latent_height // patch[1]) * (ask.latent_width // patch[2])
    return text_rows + STEREO * ask.audio_latents + (ask.latent_frames + len(ask.anchors)) * frame


def build_layout(
    ask: Ask,
    text_tags: npt.NDArray[np.int8],
    visual: list[LatentSize],
    sound: list[int],
    patch: tuple[int, int, int],
) -> Layout:
    """`text_tags` [L]; `visual`: sizes of encoded pictures and clips; `sound`: latents per channel of each sound."""
    grid = _Grid(patch[1], patch[2])
    builder = _Builder(text_tags)
    target = LatentSize(ask.latent_frames, ask.latent_height, ask.latent_width)
    if ask.references:
        _add_references(builder, grid, ask, visual, sound)
    else:
        for anchor in ask.anchors:
            last = builder.clock + _pairwise_span(target.frames) - _FRAME_UNITS
            time = builder.clock if anchor == "first" else last
            builder.video(np.array([time]), grid.frame(target), CONDITION_VIDEO)
    builder.audio(ask.audio_latents, grid.width_axis(target), TARGET_AUDIO)
    builder.video(_frame_times(target.frames, builder.clock), grid.frame(target), TARGET_VIDEO)
    return builder.finish()


def _add_references(builder: _Builder, grid: _Grid, ask: Ask, visual: list[LatentSize], sound: list[int]) -> None:
    sizes, sounds = iter(visual), iter(sound)
    target = LatentSize(ask.latent_frames, ask.latent_height, ask.latent_width)
    for reference in ask.references:
        size = next(sizes) if reference.kind != "audio" else target
        latents = next(sounds) if reference.has_sound else 0
        if reference.has_sound:
            builder.audio(latents, grid.width_axis(size), CONDITION_AUDIO)
        if reference.kind == "image":
            builder.video(np.array([builder.clock]), grid.frame(size), CONDITION_VIDEO)
            builder.clock += 1.0
        elif reference.kind == "video":
            builder.video(_frame_times(size.frames, builder.clock), grid.frame(size), CONDITION_VIDEO)
            builder.clock += max(float(latents), _sequential_span(size.frames))
        else:
            builder.clock += float(latents)


class _Grid:
    """Coordinates of the patches of a frame: centred, as long as the side over the square root of the area."""

    def __init__(self, patch_height: int, patch_width: int) -> None:
        self._patch_height = patch_height
        self._patch_width = patch_width

    def frame(self, size: LatentSize) -> Positions:
        """[rows, 2]: (h, w) of each patch, row by row."""
        high = _axis(size.height, self._patch_height, size)
        wide = self.width_axis(size)
        return np.stack(np.meshgrid(high, wide, indexing="ij"), axis=-1).reshape(-1, 2)

    def width_axis(self, size: LatentSize) -> Positions:
        return _axis(size.width, self._patch_width, size)


def _axis(side: int, patch: int, size: LatentSize) -> Positions:
    length = float(side / np.sqrt(size.height * size.width))
    start = (1.0 - length) / 2.0
    axis: Positions = np.linspace(start, start + length, side // patch, endpoint=False) * _SPACE_UNITS
    return axis


def _spans(frames: int) -> Positions:
    """How long each latent frame lasts."""
    return np.array([_FRAME_UNITS * _FRAMES_PER_LATENT[i % len(_FRAMES_PER_LATENT)] for i in range(frames)])


def _frame_times(frames: int, start: float) -> Positions:
    times: Positions = start + np.concatenate(([0.0], _spans(frames)[:-1].cumsum()))
    return times


def _pairwise_span(frames: int) -> float:
    """The sum of all spans as numpy adds them up: its last bit differs from `_sequential_span`, as in the formulas."""
    return float(_spans(frames).sum())


def _sequential_span(frames: int) -> float:
    total = 0.0
    for span in _spans(frames):
        total += float(span)
    return total


class _Builder:
    """Appends blocks of rows; `clock` is where the next block starts in time."""

    def __init__(self, text_tags: npt.NDArray[np.int8]) -> None:
        count = len(text_tags)
        text = np.zeros((count, 3))
        text[:, 0] = np.arange(count)
        self.clock = float(count)
        self._text_rows = count
        self._positions = [text]
        self._tags: list[Index] = [text_tags.astype(np.int64)]
        self._levels: list[Index] = [np.full(count, TARGET_VIDEO)]
        self._video: list[Index] = []
        self._audio: list[Index] = []

    def video(self, times: Positions, frame: Positions, level: int) -> None:
        """Rows of `len(times)` frames with the (h, w) of `frame`, frame by frame."""
        block = np.empty((len(times), len(frame), 3))
        block[:, :, 0] = times[:, None]
        block[:, :, 1:] = frame
        self._video.append(self._append(block.reshape(-1, 3), VIDEO_TAG, level))

    def audio(self, latents: int, width_axis: Positions, level: int) -> None:
        """Rows of both channels, left then right, at the two ends of the width axis."""
        block = np.zeros((STEREO, latents, 3))
        block[:, :, 0] = self.clock + np.arange(latents)
        block[0, :, 2], block[1, :, 2] = width_axis[0], width_axis[-1]
        self._audio.append(self._append(block.reshape(-1, 3), AUDIO_TAG, level))

    def finish(self) -> Layout:
        levels = np.concatenate(self._levels)
        return Layout(
            positions=np.concatenate(self._positions),
            tags=np.concatenate(self._tags),
            levels=levels,
            video=np.concatenate(self._video),
            audio=np.concatenate(self._audio),
            text_rows=self._text_rows,
            condition_video_rows=int((levels == CONDITION_VIDEO).sum()),
            condition_audio_rows=int((levels == CONDITION_AUDIO).sum()),
        )

    def _append(self, block: Positions, tag: int, level: int) -> Index:
        start = sum(len(part) for part in self._tags)
        self._positions.append(block)
        self._tags.append(np.full(len(block), tag))
        self._levels.append(np.full(len(block), level))
        return np.arange(start, start + len(block))


def text_rows_guess(prompt: str) -> int:
    """An estimate of the text rows before the prompt is tokenized."""
    return max(1, math.ceil(len(prompt) / 4))
