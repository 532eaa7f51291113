"""The encoder that makes conditions: text encoder, vision processor and the encoders of both autoencoders."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from omnistage.errors import RequestError
from omnistage.models.minimax_h3 import geometry, media
from omnistage.models.minimax_h3.ask import Ask, Reference, canvas_of
from omnistage.models.minimax_h3.autoencoders import AudioCodec, VideoCodec
from omnistage.models.minimax_h3.checkpoint import Checkpoint
from omnistage.models.minimax_h3.conditions import Conditions, Encoded, Media
from omnistage.models.minimax_h3.media import Picture, Sound
from omnistage.models.minimax_h3.presentation import STRIDE, Blocks, Presentation, Presenter, block_seconds
from omnistage.models.minimax_h3.text_encoder import load_text_encoder, load_tokenizer
from omnistage.models.minimax_h3.vision import Patches, PatchGrid, VisionProcessor


class _Prepared(NamedTuple):
    """A request's media in the model's form: the order of `pictures` (clips included) is that of the sequence."""

    pictures: list[Picture]
    sounds: list[Sound]


class ConditionEncoder:
    """Text encoder, tokenizer, vision processor and the encoders of both autoencoders.

    `video` and `audio` may be shared with a decoder that works on another thread: they are stateless.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, video: VideoCodec, audio: AudioCodec
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._video = video
        self._audio = audio
        self._presenter = Presenter(load_tokenizer(checkpoint.folder))
        self._vision = VisionProcessor(checkpoint.folder / "processor")
        self._text: Any = load_text_encoder(checkpoint.folder, dtype, device)

    @torch.inference_mode()
    def encode(self, asks: list[tuple[Ask, Media]]) -> list[Encoded]:
        """Media one by one, texts of all requests in one batch. Raises RequestError naming the medium at fault."""
        visual, prepared, seconds = [], [], []
        for ask, given in asks:
            start = time.monotonic()
            prepared.append(self._prepare(ask, given))
            visual.append(self._latents(ask, prepared[-1]))
            seconds.append(time.monotonic() - start)
        start = time.monotonic()
        read = [self._read(ask, ready) for (ask, _), ready in zip(asks, prepared, strict=True)]
        texts = self._encode_texts(read)
        spent = time.monotonic() - start
        made = []
        for text, (presentation, _, _), (pictures, sounds), media_s in zip(texts, read, visual, seconds, strict=True):
            tags = np.array(presentation.tags, np.int8)
            made.append(Encoded(Conditions(text, tags, pictures, sounds), spent, media_s))
        return made

    def _prepare(self, ask: Ask, given: Media) -> _Prepared:
        pictures: list[Picture] = []
        sounds: list[Sound] = []
        for index, anchor in enumerate(ask.anchors):
            fit = media.stretched if index == 0 else media.covered
            pictures.append(fit(given["image" if anchor == "first" else "last_image"], ask.height, ask.width))
        for index, reference in enumerate(ask.references):
            role = f"reference.{index}"
            if reference.kind != "audio":
                pictures.append(self._picture(ask, reference, given[role]))
            if reference.has_sound:
                sound = given[role if reference.kind == "audio" else f"{role}.sound"]
                rate = reference.sample_rate or self._checkpoint.sample_rate
                sounds.append(media.reference_sound(sound, rate, self._checkpoint.sample_rate, ask.frames))
        if any(sound.shape[1] == 0 for sound in sounds):
            raise RequestError("reference sound must not be empty", param="references")
        return _Prepared(pictures, sounds)

    def _picture(self, ask: Ask, reference: Reference, given: Picture) -> Picture:
        known = self._checkpoint
        if reference.kind == "image":
            return media.reference_picture(given, known.reference_short_edge, known.multiple)
        size = canvas_of(given.shape[2], given.shape[1], known, "references")
        return media.reference_clip(given, reference.fps, ask.frames, size)

    def _latents(self, ask: Ask, ready: _Prepared) -> tuple[list[Tensor], list[Tensor]]:
        pictures = []
        for picture in ready.pictures:
            if picture.ndim == 3:
                pictures.append(self._video.encode(picture[None]))
            else:
                known = self._checkpoint
                count = geometry.encodable_frames(len(picture), known.clip_frames, known.clip_latents)
                pictures.append(self._video.encode(picture[:count]))
        return pictures, [self._audio.encode(sound) for sound in ready.sounds]

    def _read(self, ask: Ask, ready: _Prepared) -> tuple[Presentation, list[Patches], list[Patches]]:
        """The token list, and the patches of pictures and of clips."""
        stills = [picture for picture in ready.pictures if picture.ndim == 3]
        patches = self._vision.pictures(stills) if stills else Patches(torch.empty(0), [])
        grids = iter(patches.grids)
        blocks: list[Blocks] = []
        clips: list[Patches] = []
        for picture in ready.pictures:
            if picture.ndim == 3:
                blocks.append(Blocks(self._pads(next(grids))))
                continue
            frames = picture[::STRIDE]
            clips.append(self._vision.clip(frames))
            _, high, wide = clips[-1].grids[0]
            blocks.append(Blocks(self._pads((1, high, wide)), block_seconds(len(frames), self._vision.temporal_patch)))
        return self._presenter.present(ask, blocks), [patches] if stills else [], clips

    def _pads(self, grid: PatchGrid) -> int:
        return grid[0] * grid[1] * grid[2] // self._vision.merge_area

    def _encode_texts(self, read: list[tuple[Presentation, list[Patches], list[Patches]]]) -> list[Tensor]:
        """[L, width] per request. Padding lies on the right, where causal attention of real rows never looks."""
        lengths = [len(presentation.tokens) for presentation, _, _ in read]
        longest = max(lengths)
        tokens, kinds, mask = (torch.zeros(len(read), longest, dtype=torch.long) for _ in range(3))
        for row, (presentation, _, _) in enumerate(read):
            tokens[row, : lengths[row]] = torch.tensor(presentation.tokens)
            kinds[row, : lengths[row]] = torch.tensor(presentation.kinds)
            mask[row, : lengths[row]] = 1
        vision = self._vision_inputs("", "image", [part for _, parts, _ in read for part in parts])
        vision |= self._vision_inputs("_videos", "video", [part for _, _, parts in read for part in parts])
        states = self._text(
            input_ids=tokens.to(self._device),
            attention_mask=mask.to(self._device),
            mm_token_type_ids=kinds.to(self._device),
            use_cache=False,
            **vision,
        ).last_hidden_state
        return [states[row, :length].cpu() for row, length in enumerate(lengths)]

    def _vision_inputs(self, suffix: str, name: str, parts: list[Patches]) -> dict[str, Tensor]:
        if not parts:
            return {}
        values = torch.cat([part.values for part in parts]).to(self._device, self._text.dtype)
        grids = torch.tensor([grid for part in parts for grid in part.grids], device=self._device)
        return {f"pixel_values{suffix}": values, f"{name}_grid_thw": grids}
