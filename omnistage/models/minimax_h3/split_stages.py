"""The encoder and the decoder of MiniMax-H3 as generation stages of their own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from omnistage.models.minimax_h3.ask import Ask, resolve
from omnistage.models.minimax_h3.autoencoders import AudioCodec, VideoCodec
from omnistage.models.minimax_h3.checkpoint import Checkpoint
from omnistage.models.minimax_h3.conditions import ConditionEncoder, Media
from omnistage.models.minimax_h3.decoding import (
    AUDIO,
    AUDIO_LATENTS,
    LATENTS,
    VIDEO,
    decode_audio,
    decode_video,
)
from omnistage.payload import MultimodalPayload
from omnistage.request import StageMetrics
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.generation.model import Produced

_SOURCES = {VIDEO: LATENTS, AUDIO: AUDIO_LATENTS}


@dataclass
class EncoderState:
    ask: Ask
    waiting: set[str]
    media: Media = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    done: bool = False


class EncoderStage:
    """`GenerationModel`: media and prompt in, one payload of conditions out."""

    def __init__(self, checkpoint: Checkpoint, encoder: ConditionEncoder, max_pixels: int) -> None:
        self._checkpoint = checkpoint
        self._encoder = encoder
        self._max_pixels = max_pixels

    def open(self, request: StageRequest) -> EncoderState:
        return EncoderState(resolve(request.params, self._checkpoint, self._max_pixels), set(request.inputs))

    def feed(self, state: EncoderState, chunk: InputChunk) -> None:
        state.media |= {name: tensor.array.copy() for name, tensor in chunk.payload.tensors.items()}
        if chunk.final:
            state.waiting.discard(chunk.port)
        chunk.payload.release()

    def pending(self, state: EncoderState) -> int:
        return 0 if state.waiting or state.done else 1

    def run(self, states: list[EncoderState]) -> list[list[Produced]]:
        encoded = self._encoder.encode([(state.ask, state.media) for state in states])
        payloads = [made.conditions.payload() for made in encoded]
        for state, made in zip(states, encoded, strict=True):
            state.seconds = {"prompt_encode_s": made.prompt_s, "media_encode_s": made.media_s}
            state.done = True
        return [[Produced(port="conditions", payload=payload, final=True)] for payload in payloads]

    def done(self, state: EncoderState) -> bool:
        return state.done

    def metrics(self, state: EncoderState) -> StageMetrics:
        return StageMetrics(extra=dict(state.seconds))

    def close(self, state: EncoderState) -> None:
        state.media = {}


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
