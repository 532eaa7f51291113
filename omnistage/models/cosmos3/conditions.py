"""Clean latents: of images, videos and action clips, and of transfer chunks with their control videos."""

from __future__ import annotations

import torch
from torch import Tensor

from omnistage.models.cosmos3.ask import Ask
from omnistage.models.cosmos3.checkpoint import Checkpoint
from omnistage.models.cosmos3.codecs import PictureCodec
from omnistage.models.cosmos3.flight import Flight
from omnistage.models.cosmos3.media import Frames, reflect_in_time, repeat_last
from omnistage.models.cosmos3.transfer_plan import TransferAsk
from omnistage.payload import Array


class Conditions:
    """Everything that the picture codec encodes before or between denoising runs."""

    def __init__(self, frames: Frames, codec: PictureCodec, checkpoint: Checkpoint) -> None:
        self._frames = frames
        self._codec = codec
        self._checkpoint = checkpoint

    def encode(self, state: Flight) -> Tensor | None:
        """The clean vision latents [1, C, T, h, w] of a request; None when nothing conditions it."""
        ask = state.ask
        if ask.transfer is not None:
            state.control_clips = self._controls(state, ask.transfer)
            return None
        if not ask.source:
            return None
        media = state.media[ask.source]
        if ask.action is not None:
            frames = media.reshape(-1, *media.shape[-3:])
            latents = self._codec.encode(self._frames.on_canvas(frames, ask.action.canvas, ask.frames))
            return latents[..., : ask.latent_height, : ask.latent_width].contiguous()
        if ask.source == "image":
            clip = self._frames.image(media.reshape(media.shape[-3:]), (ask.height, ask.width))
        else:
            clip = self._kept(ask, media)
        return self._codec.encode(repeat_last(clip[:, :, : ask.frames], ask.frames))

    def _kept(self, ask: Ask, frames: Array) -> Tensor:
        """The frames of a video that its clean latent frames need, from its beginning or its end."""
        clip = self._frames.video(frames, (ask.height, ask.width))
        count = max(ask.clean_frames) * self._checkpoint.temporal + 1
        return clip[:, :, :count] if ask.keep == "first" else clip[:, :, -count:]

    def clean_frames(self, state: Flight) -> tuple[int, ...]:
        """The latent frames that are clean in the run that starts now."""
        if state.ask.transfer is None:
            return state.ask.clean_frames
        if not state.seeded_frames:
            return ()
        return tuple(range((state.seeded_frames - 1) // self._checkpoint.temporal + 1))

    def actions(self, state: Flight) -> Tensor | None:
        """The given actions [chunk, action_dim] of forward dynamics: cut or continued by the last, zero-padded."""
        action = state.ask.action
        if action is None or action.mode != "forward_dynamics":
            return None
        given = torch.from_numpy(state.media["actions"].astype("float32"))[: action.chunk]
        padded = torch.zeros(action.chunk, self._checkpoint.action_dim)
        padded[: len(given), : given.shape[1]] = given
        padded[len(given) :, : given.shape[1]] = given[-1]
        return padded

    # -- transfer

    def _controls(self, state: Flight, transfer: TransferAsk) -> list[Tensor]:
        size = (state.ask.height, state.ask.width)
        longest = max(transfer.total_frames, transfer.chunk_frames)
        clips = (self._frames.video(state.media[f"control_{hint}"], size) for hint in transfer.hints)
        return [reflect_in_time(clip, longest) for clip in clips]

    def next_chunk(self, state: Flight) -> Tensor:
        """Encodes the control videos of the chunk under way and its seeded target, which is returned."""
        transfer = _transfer_of(state)
        start, stop = transfer.window(state.chunk)
        windows = [reflect_in_time(clip[:, :, start:stop], transfer.chunk_frames) for clip in state.control_clips]
        seed = self._seed(state, transfer)
        if seed is None:
            target = torch.zeros(1, 3, transfer.chunk_frames, state.ask.height, state.ask.width)
        else:
            target = repeat_last(seed, transfer.chunk_frames)
        controls = [self._codec.encode(window) for window in windows]
        encoded = self._codec.encode(target)
        state.controls = controls
        state.seeded_frames = 0 if seed is None else seed.shape[2]
        return encoded

    def _seed(self, state: Flight, transfer: TransferAsk) -> Tensor | None:
        """The frames that a chunk starts with: of the input video, or the last ones of the chunk before."""
        if state.chunk == 0:
            count = min(transfer.first_overlap, transfer.chunk_frames)
            if not count or "video" not in state.media:
                return None
            return self._frames.video(state.media["video"], (state.ask.height, state.ask.width))[:, :, :count]
        count = min(transfer.overlap, transfer.chunk_frames)
        return state.previous[:, :, -count:] if count and state.previous is not None else None

    def decode_chunk(self, state: Flight) -> Tensor:
        """The pixels of the chunk that has just been denoised."""
        return self._codec.decode(state.ready()[0].vision).clamp(-1, 1)


def _transfer_of(state: Flight) -> TransferAsk:
    if state.ask.transfer is None:
        raise RuntimeError("not a transfer request")
    return state.ask.transfer
