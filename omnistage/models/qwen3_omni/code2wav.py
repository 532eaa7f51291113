"""The stage code2wav: codec frames to a waveform, streamed; requests of any position share a step.

Input port "codes": tensor "codes" int32 [G, frames]. Output port "audio": tensor "audio" float32 [1, samples], `meta`
{"sample_rate": 24000}. Each frame is computed once and the samples depend neither on chunk sizes nor on batch mates.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from omnistage.config.model import StageContext
from omnistage.errors import RequestError
from omnistage.models.qwen3_omni.loading import Code2WavPart, load_part
from omnistage.models.qwen3_omni.pipeline import SAMPLE_RATE
from omnistage.models.qwen3_omni.streaming import StreamingVocoder, StreamState
from omnistage.ops.blocked import block_convolutions, block_linears, choose_layout
from omnistage.ops.layout_rule import LayoutName
from omnistage.payload import MultimodalPayload
from omnistage.request import StageMetrics
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.generation.model import Produced


class WaveState:
    """One request: codes [G, n] that wait, and the state of its stream."""

    __slots__ = ("closed", "codes", "complete", "computed", "frames_in", "next_chunk", "samples", "stream")

    def __init__(self, codes: Tensor, first_chunk: int) -> None:
        self.codes = codes
        self.stream = StreamState()
        self.next_chunk = first_chunk
        self.complete = False
        self.closed = False
        self.frames_in = 0
        self.computed = 0
        self.samples = 0


class Code2Wav:
    """A `GenerationModel`: each step decodes the next chunk of every request in the batch.

    A request's first chunk has `first_frames` frames; chunks double up to `chunk_frames`, so that each is heard about
    as long as the next one takes to come.
    """

    def __init__(self, vocoder: StreamingVocoder, device: torch.device, first_frames: int, chunk_frames: int) -> None:
        self._vocoder = vocoder
        self._device = device
        self._first_frames = min(first_frames, chunk_frames)
        self._chunk_frames = chunk_frames

    def open(self, request: StageRequest) -> WaveState:
        empty = torch.zeros(self._vocoder.groups, 0, dtype=torch.long, device=self._device)
        return WaveState(empty, self._first_frames)

    def feed(self, state: WaveState, chunk: InputChunk) -> None:
        payload = chunk.payload
        if "codes" in payload.tensors:
            codes = np.array(payload["codes"], np.int64)
            self._check(codes)
            state.codes = torch.cat((state.codes, torch.from_numpy(codes).to(self._device)), dim=1)
            state.frames_in += codes.shape[1]
        state.complete = state.complete or chunk.final
        payload.release()

    def pending(self, state: WaveState) -> int:
        """Frames of the next chunk, if it is whole or the last; one when only the end is to be told."""
        waiting = state.codes.shape[1]
        if state.closed or (not state.complete and waiting < state.next_chunk):
            return 0
        return max(1, min(waiting, state.next_chunk))

    def run(self, states: list[WaveState]) -> list[list[Produced]]:
        chunks = [state.codes[:, : state.next_chunk] for state in states]
        busy = [index for index, chunk in enumerate(chunks) if chunk.shape[1]]
        samples: dict[int, Tensor] = {}
        streams: dict[int, StreamState] = {}
        if busy:
            with torch.inference_mode():
                made, nexts = self._vocoder.advance(
                    [chunks[index] for index in busy], [states[index].stream for index in busy]
                )
            samples = dict(zip(busy, made, strict=True))
            streams = dict(zip(busy, nexts, strict=True))
        audio = [_array(samples.get(index)) for index in range(len(states))]
        for index, stream in streams.items():
            states[index].stream = stream
        return [
            self._commit(state, chunk.shape[1], wave) for state, chunk, wave in zip(states, chunks, audio, strict=True)
        ]

    def done(self, state: WaveState) -> bool:
        return state.closed

    def metrics(self, state: WaveState) -> StageMetrics:
        counts = {
            "frames_in": state.frames_in,
            "frames_computed": state.computed,
            "frames_out": state.stream.frames,
            "samples_out": state.samples,
        }
        return StageMetrics(extra={name: float(value) for name, value in counts.items()})

    def close(self, state: WaveState) -> None:
        """Nothing is held: chunks are copied when they come."""

    def _check(self, codes: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
        groups, codebook = self._vocoder.groups, self._vocoder.codebook
        if codes.ndim != 2 or len(codes) != groups or (codes.size and not 0 <= codes.min() <= codes.max() < codebook):
            raise RequestError(f"codes must be [{groups}, frames] below {codebook}", param="codes")

    def _commit(
        self, state: WaveState, frames: int, wave: np.ndarray[tuple[int], np.dtype[np.float32]]
    ) -> list[Produced]:
        state.codes = state.codes[:, frames:]
        state.computed += frames
        state.samples += len(wave)
        state.next_chunk = min(2 * state.next_chunk, self._chunk_frames)
        state.closed = state.complete and not state.codes.shape[1]
        if not len(wave) and not state.closed:
            return []
        payload = MultimodalPayload.of({"sample_rate": SAMPLE_RATE}, audio=wave[None])
        return [Produced(port="audio", payload=payload, final=state.closed)]


def create(context: StageContext) -> Code2Wav:
    """Component factory of the stage `code2wav`."""
    part, device, _ = load_part(Code2WavPart, context.model_path, context.stage)
    lay_out(part.code2wav, choose_layout(context.stage.weight_layout, part))
    options = context.stage.options
    first, later = int(options["first_chunk_frames"]), int(options["chunk_frames"])
    return Code2Wav(StreamingVocoder(part.code2wav, context.stage.token_budget), device, first, later)


def lay_out(vocoder: nn.Module, layout: LayoutName) -> None:
    """Puts the weights of transformers' vocoder in blocks, in place."""
    block_linears(vocoder, layout)
    block_convolutions(vocoder, layout)


def _array(samples: Tensor | None) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.zeros(0, np.float32) if samples is None else samples.cpu().numpy()
