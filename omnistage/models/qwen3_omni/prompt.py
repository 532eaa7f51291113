"""A thinker's prompt: token ids, three-axis rotary positions, media, and the part of it that the talker needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.functional import split

from omnistage.models.qwen3_omni.encoders import Medium, content_key, window_tokens
from omnistage.models.qwen3_omni.positions import Positions
from omnistage.models.qwen3_omni.processor import Prepared
from omnistage.stages.ar.model import ContentSpan


@dataclass(frozen=True, slots=True)
class ThinkerPrompt:
    """`media` in the order of their kinds."""

    ids: list[int]
    positions: Positions
    media: tuple[Medium, ...] = ()

    def content(self) -> tuple[ContentSpan, ...]:
        return tuple(ContentSpan(medium.start, medium.stop, medium.key) for medium in self.media)


def text_prompt(ids: list[int]) -> ThinkerPrompt:
    """A prompt without media."""
    return ThinkerPrompt(ids, Positions.plain(len(ids)))


def media_prompt(thinker: Any, prepared: Prepared) -> ThinkerPrompt:
    """A prompt with media; `thinker` is transformers' module, whose configuration and position rules apply."""
    config = thinker.config
    ids = prepared.ids
    positions = Positions.plain(len(ids))
    if prepared.image_grids is not None or prepared.video_grids is not None:
        found, deltas = thinker.get_rope_index(
            ids[None],
            image_grid_thw=prepared.image_grids,
            video_grid_thw=prepared.video_grids,
            attention_mask=torch.ones_like(ids)[None],
            use_audio_in_video=prepared.paired,
            audio_seqlens=torch.tensor([mel.shape[1] for mel in prepared.mels]),
            second_per_grids=prepared.video_seconds,
        )
        positions = Positions(found[:, 0], int(deltas[0, 0]))
    merge = config.vision_config.spatial_merge_size**2
    media = (
        *_sounds(prepared, ids == config.audio_token_id, config.audio_config.n_window),
        *_pictures("image", prepared.pixels, prepared.image_grids, ids == config.image_token_id, merge),
        *_pictures("video", prepared.video_pixels, prepared.video_grids, ids == config.video_token_id, merge,
                   prepared.video_seconds),
    )  # fmt: skip
    return ThinkerPrompt(ids.tolist(), positions, media)


def _sounds(prepared: Prepared, mask: Tensor, n_window: int) -> list[Medium]:
    mels = prepared.mels
    padding = max([min(mel.shape[1], 2 * n_window) for mel in mels], default=0)
    places = split(mask.nonzero()[:, 0], [window_tokens(mel.shape[1], n_window) for mel in mels])
    return [
        Medium("audio", place, mel, content_key("audio", mel, padding), padding=padding)
        for place, mel in zip(places, mels, strict=True)
    ]


def _pictures(
    kind: str, pixels: Tensor | None, grids: Tensor | None, mask: Tensor, merge: int, seconds: Tensor | None = None
) -> list[Medium]:
    if pixels is None or grids is None:
        return []
    sizes = grids.prod(-1).tolist()
    places = split(mask.nonzero()[:, 0], [size // merge for size in sizes])
    rates = seconds.tolist() if seconds is not None else [0.0] * len(sizes)
    return [
        Medium(kind, place, part, content_key(kind, part, *grid, rate), grid=tuple(grid), seconds=rate)
        for place, part, grid, rate in zip(places, split(pixels, sizes), grids.tolist(), rates, strict=True)
    ]
