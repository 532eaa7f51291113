"""The stage code2wav: acoustic frames to a waveform, streamed; requests of any position share a step.

Input port "frames": the talker's chunks. Output port "audio": tensor "audio" float32 [1, samples], `meta`
{"sample_rate": 24000}. Each frame is decoded once; the samples do not depend on chunk sizes or batch mates. A voice
with another rate is resampled with the state of the filter carried from chunk to chunk.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import soxr

from omnistage.config.model import StageContext
from omnistage.errors import RequestError
from omnistage.models.smol_speech.artefacts import HEART, JOE
from omnistage.models.smol_speech.decoding import Decoded, Decoder, Part, Stream
from omnistage.models.smol_speech.heart_decoder import HeartDecoder
from omnistage.models.smol_speech.joe_decoder import JoeDecoder
from omnistage.models.smol_speech.talker import TalkerParams, talker_params
from omnistage.payload import MultimodalPayload
from omnistage.request import StageMetrics
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.generation.model import Produced

Array = npt.NDArray[Any]

SAMPLE_RATE = 24000


class WaveState:
    """One request: segments that wait for the decoder, and where its audio stands."""

    __slots__ = ("closed", "complete", "decoder", "frames_in", "frames_out", "resampler", "samples", "seed", "streams")

    def __init__(self, decoder: Decoder, seed: int) -> None:
        self.decoder = decoder
        self.seed = seed
        self.streams: deque[Stream] = deque()
        self.complete = False
        self.closed = False
        self.frames_in = 0
        self.frames_out = 0
        self.samples = 0
        self.resampler: Any = None


class Code2Wav:
    """A `GenerationModel`: each step decodes the next chunk of every request in the batch.

    `first_frames` is the size of a request's first chunk in frames, `chunk_frames` that of the others.
    """

    def __init__(self, decoders: dict[str, Decoder], first_frames: int, chunk_frames: int) -> None:
        self._decoders = decoders
        self._first_frames = first_frames
        self._chunk_frames = chunk_frames

    def open(self, request: StageRequest) -> WaveState:
        params: TalkerParams = talker_params(request.params)
        decoder = self._decoders.get(params.voice)
        if decoder is None:
            raise RequestError(f"unknown voice {params.voice!r}; known: {', '.join(self._decoders)}", param="voice")
        return WaveState(decoder, request.seed)

    def feed(self, state: WaveState, chunk: InputChunk) -> None:
        payload = chunk.payload
        if payload.tensors:
            tensors = {name: tensor.array for name, tensor in payload.tensors.items()}
            stream = state.decoder.begin(tensors, state.seed, int(payload.meta["segment"]))
            state.streams.append(stream)
            state.frames_in += len(stream.rows)
        state.complete = state.complete or chunk.final
        payload.release()

    def pending(self, state: WaveState) -> int:
        """Frames to decode; one more when only the end is to be told."""
        if state.closed:
            return 0
        return sum(len(stream.rows) - stream.taken for stream in state.streams) + state.complete

    def run(self, states: list[WaveState]) -> list[list[Produced]]:
        decoded: dict[int, Decoded] = {}
        for decoder in self._decoders.values():
            mine = [index for index, state in enumerate(states) if state.decoder is decoder and state.streams]
            parts = [self._next_part(states[index]) for index in mine]
            decoded |= dict(zip(mine, decoder.decode(parts) if parts else [], strict=True))
        return [self._commit(state, decoded.get(index)) for index, state in enumerate(states)]

    def done(self, state: WaveState) -> bool:
        return state.closed

    def metrics(self, state: WaveState) -> StageMetrics:
        counts = {"frames_in": state.frames_in, "frames_out": state.frames_out, "samples_out": state.samples}
        return StageMetrics(extra={name: float(value) for name, value in counts.items()})

    def close(self, state: WaveState) -> None:
        state.streams.clear()

    def _next_part(self, state: WaveState) -> Part:
        """At the start of a segment the decoder needs `lookahead` frames more to give a chunk."""
        stream = state.streams[0]
        wanted = self._chunk_frames if state.samples else self._first_frames
        if not stream.taken:
            wanted += state.decoder.lookahead
        return Part.next(stream, wanted)

    def _commit(self, state: WaveState, decoded: Decoded | None) -> list[Produced]:
        samples = np.zeros(0, np.float32)
        if decoded is not None:
            decoded.commit()
            samples = decoded.samples
            state.frames_out += decoded.given
            if decoded.part.ends:
                state.streams.popleft()
        state.closed = state.complete and not state.streams
        samples = self._at_output_rate(state, samples)
        state.samples += len(samples)
        if not len(samples) and not state.closed:
            return []
        payload = MultimodalPayload.of({"sample_rate": SAMPLE_RATE}, audio=samples[None])
        return [Produced(port="audio", payload=payload, final=state.closed)]

    def _at_output_rate(self, state: WaveState, samples: Array) -> Array:
        rate = state.decoder.sample_rate
        if rate == SAMPLE_RATE:
            return samples
        if state.resampler is None:
            state.resampler = soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32")
        resampled: Array = state.resampler.resample_chunk(samples, last=state.closed)
        return resampled


def create(context: StageContext) -> Code2Wav:
    """Component factory of the stage `code2wav`."""
    path, cache = context.model_path, context.config.cache_dir
    device = "cpu" if context.stage.device == "auto" else context.stage.device
    decoders: dict[str, Decoder] = {
        "heart": HeartDecoder(HEART.locate(path, cache), device),
        "joe": JoeDecoder(JOE.locate(path, cache), device),
    }
    options = context.stage.options
    return Code2Wav(decoders, int(options["first_chunk_frames"]), int(options["chunk_frames"]))
