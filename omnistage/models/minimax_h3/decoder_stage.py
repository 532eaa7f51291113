"""Latents to pictures and sound, as a stage of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from omnistage.config.model import StageContext
from omnistage.models.minimax_h3.ask import resolve
from omnistage.models.minimax_h3.autoencoders import AudioCodec, VideoCodec
from omnistage.models.minimax_h3.checkpoint import Checkpoint
from omnistage.models.minimax_h3.decoding import AUDIO, AUDIO_LATENTS, LATENTS, VIDEO, decode_audio, decode_video
from omnistage.models.minimax_h3.serving import codecs, device_and_dtype, max_pixels, served_checkpoint
from omnistage.payload import MultimodalPayload
from omnistage.request import StageMetrics
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.generation.model import GenerationModel, Produced

_SOURCES = {VIDEO: LATENTS, AUDIO: AUDIO_LATENTS}


@dataclass
class DecoderState:
    """`latents` by input port; `waiting`: input ports that have not delivered; `left`: output ports not yet closed."""

    left: list[str]
    waiting: set[str]
    latents: dict[str, Tensor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class DecoderStage:
    """`GenerationModel`: latents in, pictures and sound out, one port per step."""

    def __init__(self, checkpoint: Checkpoint, codecs: tuple[VideoCodec, AudioCodec], max_pixels: int) -> None:
        self._checkpoint = checkpoint
        self._codecs = codecs
        self._max_pixels = max_pixels

    def open(self, request: StageRequest) -> DecoderState:
        resolve(request.params, self._checkpoint, self._max_pixels)
        return DecoderState([port for port in (VIDEO, AUDIO) if port in request.outputs], set(request.inputs))

    def feed(self, state: DecoderState, chunk: InputChunk) -> None:
        state.latents[chunk.port] = torch.from_numpy(chunk.payload[chunk.port].copy())
        state.waiting.discard(chunk.port)
        chunk.payload.release()

    def pending(self, state: DecoderState) -> int:
        """A request whose outputs are closed still waits for its last input; the step after that only ends it."""
        return int(self._next(state) is not None or self.done(state))

    def run(self, states: list[DecoderState]) -> list[list[Produced]]:
        made = [self._decode(state) for state in states]
        for state, port, (_, seconds) in zip(states, map(self._next, states), made, strict=True):
            state.left = [name for name in state.left if name != port]
            state.seconds |= {f"{port}_decode_s": seconds} if port is not None else {}
        return [chunks for chunks, _ in made]

    def _next(self, state: DecoderState) -> str | None:
        """The first open port whose latents are there."""
        return next((port for port in state.left if _SOURCES[port] in state.latents), None)

    def _decode(self, state: DecoderState) -> tuple[list[Produced], float]:
        port = self._next(state)
        if port is None:
            return [], 0.0
        latents = state.latents[_SOURCES[port]]
        if port == VIDEO:
            chunks, seconds = decode_video(self._codecs[0], latents)
        else:
            chunks, seconds = decode_audio(self._codecs[1], latents, self._checkpoint.sample_rate)
        return closed_port(port, chunks), seconds

    def done(self, state: DecoderState) -> bool:
        return not state.left and not state.waiting

    def metrics(self, state: DecoderState) -> StageMetrics:
        return StageMetrics(extra=dict(state.seconds))

    def close(self, state: DecoderState) -> None:
        state.latents = {}


def closed_port(port: str, chunks: list[MultimodalPayload]) -> list[Produced]:
    """The chunks of a port, the last of them final."""
    last = len(chunks) - 1
    return [Produced(port=port, payload=chunk, final=at == last) for at, chunk in enumerate(chunks)]


def create(context: StageContext) -> GenerationModel[DecoderState]:
    """Component factory of the stage `decoder`: the autoencoders only."""
    checkpoint = served_checkpoint(context)
    return DecoderStage(checkpoint, codecs(checkpoint, *device_and_dtype(context)), max_pixels(context))
