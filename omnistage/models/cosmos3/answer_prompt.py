"""The reasoner's prompt: text with placeholder tokens for pictures, their patches, three-axis positions.

The library's processor needs torchvision for its video half; images go through its own image processor, videos are cut
into patches here by the same layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from omnistage.errors import RequestError
from omnistage.payload import Array, MultimodalPayload
from omnistage.stages.ar.chat_template import read_json

_IMAGE, _VIDEO = "<|image_pad|>", "<|video_pad|>"
_START, _END = "<|vision_start|>", "<|vision_end|>"
# Frames per second at which videos are looked at, and the pixels (over all frames) that they are kept within.
_VIDEO_FPS = 2.0
_VIDEO_PIXELS = (4096, 25_165_824)


@dataclass(slots=True, eq=False)
class Picture:
    """An image or one pair of video frames. `places` [k] are its rows of the prompt, `pixels` [t * h * w, d] its
    patches, `grid` (t, h, w) in patches; `key` stands for all of that. `rows` [k, hidden] and `deep` (one per deepstack
    level) are there while its part of the prompt is computed."""

    places: Tensor
    pixels: Tensor
    grid: tuple[int, int, int]
    key: bytes
    rows: Tensor | None = None
    deep: tuple[Tensor, ...] = ()

    @property
    def start(self) -> int:
        return int(self.places[0])

    @property
    def stop(self) -> int:
        return int(self.places[-1]) + 1


@dataclass(frozen=True, slots=True)
class AnswerPrompt:
    """`positions` [3, n]; rows after the prompt stand at row + `delta`."""

    ids: list[int]
    positions: Tensor
    delta: int = 0
    pictures: tuple[Picture, ...] = ()

    def positions_of(self, start: int, stop: int) -> Tensor:
        """[3, stop - start]"""
        first = max(start, len(self.ids))
        later = torch.arange(first, max(first, stop)) + self.delta
        return torch.cat((self.positions[:, start:stop], later.expand(3, -1)), dim=1)


@dataclass(frozen=True, slots=True)
class _Patches:
    """Of one medium: patches, grid, and the seconds of each temporal patch (videos)."""

    pixels: Tensor
    grid: tuple[int, int, int]
    seconds: tuple[float, ...] = ()


class PromptBuilder:
    """Makes prompts for one checkpoint; `model` is the library's (for its position rule)."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, model: Any) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._images = AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True)
        self._merge = int(self._images.merge_size)
        self._patch = int(self._images.patch_size)
        self._span = int(self._images.temporal_patch_size)
        limits = read_json(folder / "video_preprocessor_config.json").get("size") or {}
        self._video_pixels = (
            int(limits.get("shortest_edge", _VIDEO_PIXELS[0])),
            int(limits.get("longest_edge", _VIDEO_PIXELS[1])),
        )

    def text(self, text: str) -> AnswerPrompt:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return AnswerPrompt(ids, torch.arange(len(ids)).expand(3, -1))

    def with_media(self, text: str, payload: MultimodalPayload) -> AnswerPrompt:
        """`text` has one placeholder per medium, in order. Raises RequestError when they do not match."""
        kinds: list[str] = payload.meta["kinds"]
        arrays = [payload[str(index)] for index in range(len(kinds))]
        patches = [
            self._image(array) if kind == "image" else self._video(array, fps)
            for kind, array, fps in zip(kinds, arrays, payload.meta["fps"], strict=True)
        ]
        ids = self._tokenizer.encode(self._expand(text, kinds, patches), add_special_tokens=False).ids
        return self._assemble(torch.tensor(ids), kinds, patches)

    def _assemble(self, ids: Tensor, kinds: list[str], patches: list[_Patches]) -> AnswerPrompt:
        config = self._model.config
        is_image, is_video = ids == config.image_token_id, ids == config.video_token_id
        grids = {
            kind: [p.grid for k, p in zip(kinds, patches, strict=True) if k == kind] for kind in ("image", "video")
        }
        positions, deltas = self._model.get_rope_index(
            ids[None],
            mm_token_type_ids=(is_image.int() + 2 * is_video.int())[None],
            image_grid_thw=torch.tensor(grids["image"]) if grids["image"] else None,
            video_grid_thw=torch.tensor(grids["video"]) if grids["video"] else None,
            attention_mask=torch.ones_like(ids)[None],
        )
        places = {"image": is_image.nonzero()[:, 0], "video": is_video.nonzero()[:, 0]}
        pictures: list[Picture] = []
        for kind, medium in zip(kinds, patches, strict=True):
            for picture in self._pictures(medium, places[kind]):
                pictures.append(picture)
                places[kind] = places[kind][len(picture.places) :]
        return AnswerPrompt(ids.tolist(), positions[:, 0].long(), int(deltas[0, 0]), tuple(pictures))

    def _pictures(self, medium: _Patches, places: Tensor) -> list[Picture]:
        """An image whole; a video by temporal patch, whose rows are encoded apart from each other."""
        frames, height, width = medium.grid
        rows, patches = height * width // self._merge**2, height * width
        return [
            _picture(
                places[i * rows : (i + 1) * rows], medium.pixels[i * patches : (i + 1) * patches], (1, height, width)
            )
            for i in range(frames)
        ]

    def _expand(self, text: str, kinds: list[str], patches: list[_Patches]) -> str:
        """Each placeholder repeated for its rows; a video's as one block per temporal patch with its time."""
        for kind, medium in zip(kinds, patches, strict=True):
            sign = _IMAGE if kind == "image" else _START + _VIDEO + _END
            before, found, text_after = text.partition(sign)
            if not found:
                raise RequestError("the chat template has no place for a medium of these messages", param="messages")
            rows = medium.grid[1] * medium.grid[2] // self._merge**2
            if kind == "image":
                block = "\0i" * rows
            else:
                seen = _START + "\0v" * rows + _END
                block = "".join(f"<{at:.1f} seconds>{seen}" for at in medium.seconds)
            text = before + block + text_after
        return text.replace("\0i", _IMAGE).replace("\0v", _VIDEO)

    def _image(self, array: Array) -> _Patches:
        try:
            features = self._images(images=[Image.fromarray(array)], return_tensors="pt")
        except ValueError as error:
            raise RequestError(f"an image cannot be read: {error}", param="messages") from None
        frames, height, width = features["image_grid_thw"][0].tolist()
        return _Patches(features["pixel_values"], (frames, height, width))

    def _video(self, frames: Array, fps: float) -> _Patches:
        """uint8 [T, H, W, 3] at `fps` (0: every frame counts as sampled)."""
        step = fps / _VIDEO_FPS if fps else 1.0
        count = max(1, round(len(frames) / step))
        indexes = [min(int(index * step), len(frames) - 1) for index in range(count)]
        indexes += indexes[-1:] * (-len(indexes) % self._span)
        rate = fps or _VIDEO_FPS
        groups = np.array(indexes, np.float64).reshape(-1, self._span) / rate
        pixels, grid = self._patchify(self._resized(frames[indexes]))
        return _Patches(pixels, grid, tuple(float(group.mean()) for group in groups[:, [0, -1]]))

    def _resized(self, frames: Array) -> Array:
        height, width = frames.shape[1:3]
        low, high = (limit // len(frames) for limit in self._video_pixels)
        size = smart_resize(height, width, self._patch * self._merge, max(low, 1), max(high, 1))
        if size == (height, width):
            return frames
        resized = [Image.fromarray(frame).resize(size[::-1], Image.Resampling.BICUBIC) for frame in frames]
        return np.stack([np.asarray(frame) for frame in resized])

    def _patchify(self, frames: Array) -> tuple[Tensor, tuple[int, int, int]]:
        """Rows (time, block row, block column, row, column in block) of (channel, frame in patch, row, column)."""
        mean, std = (np.array(value, np.float32) for value in (self._images.image_mean, self._images.image_std))
        scaled = (frames.astype(np.float32) * self._images.rescale_factor - mean) / std
        span, patch, merge = self._span, self._patch, self._merge
        grid = (len(frames) // span, frames.shape[1] // patch, frames.shape[2] // patch)
        blocks = scaled.reshape(
            grid[0], span, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, 3
        ).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return torch.from_numpy(np.ascontiguousarray(blocks.reshape(math.prod(grid), -1))), grid


def _picture(places: Tensor, pixels: Tensor, grid: tuple[int, int, int]) -> Picture:
    digest = blake2b(digest_size=16)
    digest.update(repr((grid, tuple(pixels.shape), (places - places[0]).tolist())).encode())
    digest.update(pixels.contiguous().numpy().data)
    return Picture(places, pixels, grid, digest.digest())
