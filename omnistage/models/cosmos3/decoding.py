"""What follows the last step, on the decode thread: latents to pictures, sound and actions; and previews before it."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator

import numpy as np
import torch
from torch import Tensor

from omnistage.models.cosmos3.checkpoint import MAX_PIXELS
from omnistage.models.cosmos3.codecs import PictureCodec, SoundCodec, pixels_of
from omnistage.models.cosmos3.conditions import Conditions
from omnistage.models.cosmos3.flight import Flight
from omnistage.ops.finite import finite
from omnistage.payload import MultimodalPayload
from omnistage.stages.diffusion.model import PARTIAL_PORT, Preview, Produced
from omnistage.stages.diffusion.previews import preview_is_due

_PICTURES = frozenset({"image", "video"})


class Decoder:
    """Decodes finished requests, those of equal shape in one call of the picture codec.

    On one CPU core a call for 2, 4 and 8 requests takes 0.73, 0.48 and 0.33 of the time of a call for each. The codec
    clears the caches of its causal convolutions at each call and holds them per item of the batch, so that requests
    share none.
    """

    def __init__(self, pictures: PictureCodec, sound: SoundCodec | None, conditions: Conditions) -> None:
        self._pictures = pictures
        self._sound = sound
        self._conditions = conditions

    def group(self, state: Flight) -> Hashable:
        """States of equal groups may come in one call."""
        ask = state.ask
        if ask.transfer is not None or not _PICTURES.intersection(state.request.outputs):
            return state.request.request_id
        return (ask.latent_frames, ask.latent_height, ask.latent_width)

    def decode(self, states: list[Flight]) -> list[list[Produced]]:
        """All outputs of each state, which is done then."""
        start = time.monotonic()
        clips = list(self._clips(states))
        seconds = time.monotonic() - start
        made = [self._outputs(state, clip, seconds) for state, clip in zip(states, clips, strict=True)]
        for state in states:
            state.done = True
        return made

    def preview(self, state: Flight) -> Preview | None:
        """The picture that the last step points to, where one is due."""
        expected, steps = state.expected, state.ask.steps
        if expected is None or not preview_is_due(state.step, steps, state.ask.partial_images):
            return None
        meta = {"step": state.step, "steps": steps}

        def draw() -> Produced:
            pixels = pixels_of(self._pictures.decode(expected)).numpy()
            return Produced(port=PARTIAL_PORT, payload=MultimodalPayload.of(meta, image=pixels))

        return draw

    def _clips(self, states: list[Flight]) -> Iterator[Tensor | None]:
        """Pixels [1, 3, frames, H, W] of each state; None for those that give no pictures."""
        first = states[0]
        if not _PICTURES.intersection(first.request.outputs):
            yield None
        elif first.ask.transfer is not None:
            first.end_chunk(self._conditions.decode_chunk(first))
            yield torch.cat(first.chunks, dim=2)[:, :, : first.ask.transfer.total_frames]
        else:
            size = max(1, MAX_PIXELS // (first.ask.height * first.ask.width))
            for at in range(0, len(states), size):
                latents = torch.cat([state.ready()[0].vision for state in states[at : at + size]])
                yield from torch.split(self._pictures.decode(latents), 1)

    def _outputs(self, state: Flight, clip: Tensor | None, video_s: float) -> list[Produced]:
        latents, _ = state.ready()
        made: dict[str, MultimodalPayload] = {}
        if clip is not None:
            made |= _pictures(state, finite(clip, "pictures"))
        start = time.monotonic()
        if latents.sound is not None and self._sound is not None:
            wave = finite(self._sound.decode(latents.sound), "samples").cpu().numpy().astype(np.float32)
            made["audio"] = MultimodalPayload.of({"sample_rate": self._sound.rate}, audio=wave)
            made["audio_latents"] = MultimodalPayload.of(audio_latents=latents.sound.cpu().numpy())
        state.seconds |= {"video_decode_s": video_s, "audio_decode_s": time.monotonic() - start}
        action = state.ask.action
        if action is not None and latents.action is not None and action.mode != "forward_dynamics":
            moves = finite(latents.action[:, : action.domain.width], "actions")
            made["action"] = MultimodalPayload.of(action=moves.cpu().numpy())
        vision = torch.cat(state.chunk_latents, dim=2) if state.chunk_latents else latents.vision
        made["latents"] = MultimodalPayload.of(latents=vision.cpu().numpy())
        return [Produced(port=port, payload=made[port], final=True) for port in state.request.outputs if port in made]


def _pictures(state: Flight, clip: Tensor) -> dict[str, MultimodalPayload]:
    pixels = pixels_of(clip).numpy()
    if state.ask.is_image:
        return {"image": MultimodalPayload.of(image=pixels)}
    return {"video": MultimodalPayload.of({"fps": state.ask.fps}, video=pixels)}
