"""All of one request in the diffusion stage, and the arithmetic on it that needs no model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from omnistage.models.minimax_h3 import schedule
from omnistage.models.minimax_h3.ask import Ask
from omnistage.models.minimax_h3.checkpoint import Checkpoint
from omnistage.models.minimax_h3.conditions import Conditions, Media
from omnistage.models.minimax_h3.denoiser import Document, PackedLayout, Velocity, on_device
from omnistage.models.minimax_h3.geometry import STEREO
from omnistage.models.minimax_h3.layout import LatentSize, Layout, build_layout
from omnistage.models.minimax_h3.schedule import CONDITION_TIME
from omnistage.ops.step_cache import CacheMemory, CacheTurn
from omnistage.stages.base import StageRequest


@dataclass
class Prepared:
    """From `prepare` on, on the device. Condition rows stay as they are; only the targets take steps."""

    text: Tensor
    layout: PackedLayout
    condition_video: Tensor
    condition_audio: Tensor
    video: Tensor
    audio: Tensor


@dataclass
class H3State:
    """`waiting`: input ports that have not delivered; `left`: output ports of the model that are not closed.

    `sigmas`, `audio_sigmas` float32 [n]; a step uses entry `step` and the next one of both.
    """

    request: StageRequest
    ask: Ask
    sigmas: Tensor
    audio_sigmas: Tensor
    waiting: set[str]
    left: list[str]
    media: Media = field(default_factory=dict)
    conditions: Conditions | None = None
    prepared: Prepared | None = None
    memory: CacheMemory = field(default_factory=CacheMemory)
    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Model calls from start to end: the two modalities step together."""
        return min(len(self.sigmas), len(self.audio_sigmas)) - 1


def patchify(latents: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """[1, C, T, h, w] to rows [patches, C * patch], frame by frame, row by row; a row is ordered (C, t, h, w)."""
    _, channels, frames, height, width = latents.shape
    t, h, w = patch
    split = latents.reshape(channels, frames // t, t, height // h, h, width // w, w)
    return split.permute(1, 3, 5, 0, 2, 4, 6).reshape(-1, channels * t * h * w)


def unpatchify(rows: Tensor, size: LatentSize, patch: tuple[int, int, int]) -> Tensor:
    """The inverse of `patchify`."""
    t, h, w = patch
    split = rows.reshape(size.frames // t, size.height // h, size.width // w, -1, t, h, w)
    return split.permute(3, 0, 4, 1, 5, 2, 6).reshape(1, -1, size.frames, size.height, size.width)


def layout_of(ask: Ask, conditions: Conditions, checkpoint: Checkpoint) -> Layout:
    visual = [LatentSize(*(int(side) for side in latents.shape[2:])) for latents in conditions.visual]
    sound = [len(rows) // STEREO for rows in conditions.sound]
    return build_layout(ask, conditions.tags, visual, sound, checkpoint.patch)


def prepare(state: H3State, text: Tensor, checkpoint: Checkpoint, device: torch.device) -> Prepared:
    """Layout and noise. `text` is refined. One generator gives, in this order, the noise of each visual condition, of
    the video and of the audio; noise that the client brought is not drawn."""
    assert state.conditions is not None
    ask, patch = state.ask, checkpoint.patch
    generator = torch.Generator().manual_seed(state.request.seed)
    conditions = []
    for clean in state.conditions.visual:
        noise = torch.randn(clean.shape, generator=generator, dtype=torch.float32)
        conditions.append(patchify(schedule.noised_condition(clean, noise), patch))
    size = (1, checkpoint.channels, ask.latent_frames, ask.latent_height, ask.latent_width)
    video = _given(state.media, "latents") if ask.own_latents else torch.randn(size, generator=generator)
    if ask.own_audio_latents:
        audio = _given(state.media, "audio_latents").transpose(1, 2).reshape(-1, checkpoint.audio_channels)
    else:
        audio = torch.randn((STEREO * ask.audio_latents, checkpoint.audio_channels), generator=generator)
    rows = patchify(video, patch)
    sounds = [*state.conditions.sound, audio.new_empty(0, checkpoint.audio_channels)]
    return Prepared(
        text=text,
        layout=on_device(layout_of(ask, state.conditions, checkpoint), device),
        condition_video=torch.cat([*conditions, rows.new_empty(0, rows.shape[1])]).to(device),
        condition_audio=torch.cat(sounds).to(device),
        video=rows.to(device),
        audio=audio.to(device),
    )


def _given(media: Media, name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(media[name])).float()


def document(state: H3State) -> Document:
    """The request's rows at its current step."""
    ready = ready_of(state)
    return Document(
        text=ready.text,
        video=torch.cat((ready.condition_video, ready.video)),
        audio=torch.cat((ready.condition_audio, ready.audio)),
        times=_times(state),
        layout=ready.layout,
        turn=CacheTurn(state.ask.step_cache, state.memory, state.step, state.calls),
    )


def _times(state: H3State) -> tuple[float, ...]:
    """Per noise level of the layout; 1 - sigma is rounded to float32 as the schedule's times are."""
    video = float(1.0 - state.sigmas[state.step])
    audio = float(1.0 - state.audio_sigmas[state.step])
    return (video, audio, max(video, CONDITION_TIME), 1.0)


def stepped(state: H3State, velocity: Velocity) -> tuple[Tensor, Tensor]:
    """Video and audio targets one step on; the state is not changed."""
    ready = ready_of(state)
    video = velocity.video[len(ready.condition_video) :]
    audio = velocity.audio[len(ready.condition_audio) :]
    return (
        schedule.step(ready.video, video, state.sigmas, state.step),
        schedule.step(ready.audio, audio, state.audio_sigmas, state.step),
    )


def final_latents(state: H3State, checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    """float32 [1, C, T, h, w] of the video and [2, C, latents] of the audio."""
    ready, ask = ready_of(state), state.ask
    size = LatentSize(ask.latent_frames, ask.latent_height, ask.latent_width)
    audio = ready.audio.reshape(STEREO, ask.audio_latents, -1).transpose(1, 2)
    return unpatchify(ready.video, size, checkpoint.patch).contiguous(), audio.contiguous()


def ready_of(state: H3State) -> Prepared:
    """Raises RuntimeError before `prepare`."""
    if state.prepared is None:
        raise RuntimeError("a request must be prepared before its first step")
    return state.prepared
