"""Prompt and media to conditions, as a stage of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from omnistage.config.model import StageContext
from omnistage.models.minimax_h3.ask import Ask, resolve
from omnistage.models.minimax_h3.checkpoint import Checkpoint
from omnistage.models.minimax_h3.conditions import Media
from omnistage.models.minimax_h3.encoding import ConditionEncoder
from omnistage.models.minimax_h3.serving import codecs, device_and_dtype, max_pixels, served_checkpoint
from omnistage.request import StageMetrics
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.generation.model import GenerationModel, Produced


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


def create(context: StageContext) -> GenerationModel[EncoderState]:
    """Component factory of the stage `encoder`: text encoder and autoencoders."""
    checkpoint = served_checkpoint(context)
    device, dtype = device_and_dtype(context)
    made = ConditionEncoder(checkpoint, dtype, device, *codecs(checkpoint, device, dtype))
    return EncoderStage(checkpoint, made, max_pixels(context))
