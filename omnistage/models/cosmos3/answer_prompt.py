"""The reasoner's prompt: text with placeholder tokens for pictures, their patches, three-axis positions.

The library's processor needs torchvision for its video half; images go through its own image processor, videos through
`answer_video`.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoImageProcessor

from omnistage.errors import RequestError
from omnistage.models.cosmos3.answer_video import EdgeVideoReader, Patches, VideoReader
from omnistage.payload import Array, MultimodalPayload
from omnistage.stages.ar.chat_template import read_json

_IMAGE, _VIDEO = "<|image_pad|>", "<|video_pad|>"
_START, _END = "<|vision_start|>", "<|vision_end|>"
# The pixels (over all frames) that videos are kept within unless the checkpoint says otherwise.
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


class PromptBuilder:
    """Makes prompts for one checkpoint; `model` is the library's (for its position rule)."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, model: Any) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._images = AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True)
        self._merge = int(self._images.merge_size)
        limits = read_json(folder / "video_preprocessor_config.json").get("size") or {}
        pixels = (
            int(limits.get("shortest_edge", _VIDEO_PIXELS[0])),
            int(limits.get("longest_edge", _VIDEO_PIXELS[1])),
        )
        reader = EdgeVideoReader if model.config.model_type == "cosmos3_edge" else VideoReader
        self._videos = reader(self._images, pixels)

    def text(self, text: str) -> AnswerPrompt:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return AnswerPrompt(ids, torch.arange(len(ids)).expand(3, -1))

    def with_media(self, text: str, payload: MultimodalPayload) -> AnswerPrompt:
        """`text` has one placeholder per medium, in order. Raises RequestError when they do not match."""
        kinds: list[str] = payload.meta["kinds"]
        arrays = [payload[str(index)] for index in range(len(kinds))]
        patches = [
            self._image(array) if kind == "image" else self._videos(array, fps)
            for kind, array, fps in zip(kinds, arrays, payload.meta["fps"], strict=True)
        ]
        ids = self._tokenizer.encode(self._expand(text, kinds, patches), add_special_tokens=False).ids
        return self._assemble(torch.tensor(ids), kinds, patches)

    def _assemble(self, ids: Tensor, kinds: list[str], patches: list[Patches]) -> AnswerPrompt:
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

    def _pictures(self, medium: Patches, places: Tensor) -> list[Picture]:
        """An image whole; a video by temporal patch, whose rows are encoded apart from each other."""
        frames, height, width = medium.grid
        rows, patches = height * width // self._merge**2, height * width
        return [
            _picture(
                places[i * rows : (i + 1) * rows], medium.pixels[i * patches : (i + 1) * patches], (1, height, width)
            )
            for i in range(frames)
        ]

    def _expand(self, text: str, kinds: list[str], patches: list[Patches]) -> str:
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

    def _image(self, array: Array) -> Patches:
        try:
            features = self._images(images=[Image.fromarray(array)], return_tensors="pt")
        except ValueError as error:
            raise RequestError(f"an image cannot be read: {error}", param="messages") from None
        frames, height, width = features["image_grid_thw"][0].tolist()
        return Patches(features["pixel_values"], (frames, height, width))


def _picture(places: Tensor, pixels: Tensor, grid: tuple[int, int, int]) -> Picture:
    digest = blake2b(digest_size=16)
    digest.update(repr((grid, tuple(pixels.shape), (places - places[0]).tolist())).encode())
    digest.update(pixels.contiguous().numpy().data)
    return Picture(places, pixels, grid, digest.digest())
