"""The stages of echo3: two closed-form AR backends and a wave generator with a carried tail."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field

import numpy as np

from omnistage.config.model import StageContext
from omnistage.errors import RequestError
from omnistage.payload import MultimodalPayload
from omnistage.request import StageMetrics
from omnistage.stages.ar.model import (
    ARBackend,
    BackendLimits,
    Emitted,
    Event,
    Produced,
    Prompt,
    Sampled,
    Sequence,
    Work,
)
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.generation.model import GenerationModel
from omnistage.testing.closed_form import (
    CODEBOOK,
    CODES_PER_TOKEN,
    EOS,
    SAMPLE_RATE,
    SAMPLES_PER_CODE,
    TAIL_SAMPLES,
    codes_of_token,
    tokens_of,
    tone,
)
from omnistage.testing.knobs import pause

_TALKER_EOS = CODEBOOK
_MAX_LEN = 1 << 14


def limits_of(context: StageContext, eos: int) -> BackendLimits:
    blocks = max(1, (context.stage.kv_memory_mb << 20) // (64 * context.stage.block_size))  # 64 bytes stand for a token
    return BackendLimits(
        total_blocks=blocks,
        block_size=context.stage.block_size,
        max_model_len=_MAX_LEN,
        vocab_size=eos + 1,
        eos_token_ids=frozenset({eos}),
    )


@dataclass
class ThinkerState:
    prompt: list[int]
    decoder: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))


class EchoThinker:
    """Answers with its prompt: the token after n generated ones is byte n of the prompt, then EOS."""

    def __init__(self, limits: BackendLimits, delay_s: float) -> None:
        self.limits = limits
        self._delay_s = delay_s

    def open(self, request: StageRequest) -> ThinkerState:
        return ThinkerState(tokens_of(str(request.params.get("prompt", ""))))

    def feed(self, seq: Sequence[ThinkerState], chunk: InputChunk) -> None:
        raise RequestError(f"the thinker has no input port {chunk.port!r}")

    def prompt(self, seq: Sequence[ThinkerState]) -> Prompt:
        return Prompt(token_ids=[EOS, *seq.state.prompt])  # never empty

    def can_step(self, seq: Sequence[ThinkerState]) -> bool:
        return True

    def execute(self, works: list[Work[ThinkerState]]) -> list[Sampled | None]:
        pause(self._delay_s)
        return [self._next(work) if work.sample else None for work in works]

    def _next(self, work: Work[ThinkerState]) -> Sampled:
        answer = work.seq.state.prompt
        done = work.stop - work.seq.prompt_len
        return Sampled(answer[done] if done < len(answer) else EOS)

    def emit(self, seq: Sequence[ThinkerState], event: Event) -> Emitted:
        token = event.sampled.token if event.sampled is not None else EOS
        tokens = [] if token == EOS else [token]
        final = event.finish is not None
        text = seq.state.decoder.decode(bytes(tokens), final)
        if not (text or tokens or final):
            return Emitted()
        return Emitted((Produced(port="text", payload=MultimodalPayload.text(text, token_ids=tokens), final=final),))

    def close(self, seq: Sequence[ThinkerState]) -> None:
        """Holds nothing."""

    def shutdown(self) -> None:
        """Holds nothing."""


@dataclass
class TalkerState:
    tokens: list[int] = field(default_factory=list)
    closed: bool = False


class EchoTalker:
    """Speaks its input tokens: generated token g is code g % k of input token g // k; EOS after the last."""

    def __init__(self, limits: BackendLimits, delay_s: float) -> None:
        self.limits = limits
        self._delay_s = delay_s

    def open(self, request: StageRequest) -> TalkerState:
        return TalkerState()

    def feed(self, seq: Sequence[TalkerState], chunk: InputChunk) -> None:
        meta = chunk.payload.meta
        seq.state.tokens += meta["token_ids"] if "token_ids" in meta else tokens_of(str(meta.get("text", "")))
        seq.state.closed = chunk.final
        chunk.payload.release()

    def prompt(self, seq: Sequence[TalkerState]) -> Prompt | None:
        return Prompt(token_ids=[_TALKER_EOS]) if seq.state.tokens or seq.state.closed else None

    def can_step(self, seq: Sequence[TalkerState]) -> bool:
        return seq.state.closed or seq.generated // CODES_PER_TOKEN < len(seq.state.tokens)

    def execute(self, works: list[Work[TalkerState]]) -> list[Sampled | None]:
        pause(self._delay_s)
        return [self._next(work) if work.sample else None for work in works]

    def _next(self, work: Work[TalkerState]) -> Sampled:
        index, code = divmod(work.stop - work.seq.prompt_len, CODES_PER_TOKEN)
        tokens = work.seq.state.tokens
        return Sampled(codes_of_token(tokens[index])[code] if index < len(tokens) else _TALKER_EOS)

    def emit(self, seq: Sequence[TalkerState], event: Event) -> Emitted:
        token = event.sampled.token if event.sampled is not None else _TALKER_EOS
        codes = np.array([] if token == _TALKER_EOS else [token], np.int32)
        payload = MultimodalPayload.of(codes=codes)
        return Emitted((Produced(port="codes", payload=payload, final=event.finish is not None),))

    def close(self, seq: Sequence[TalkerState]) -> None:
        """Holds nothing."""

    def shutdown(self) -> None:
        """Holds nothing."""


@dataclass
class WaveState:
    """`codes` are not yet turned into samples; `tail` is what the last code adds to the next samples."""

    chunk_frames: int
    codes: list[int] = field(default_factory=list)
    tail: np.ndarray[tuple[int], np.dtype[np.float32]] = field(
        default_factory=lambda: np.zeros(TAIL_SAMPLES, np.float32)
    )
    started: bool = False
    closed: bool = False
    ended: bool = False
    frames: int = 0


class EchoWave:
    """Overlap-adds the tones of codes, `chunk_frames` codes at a time; the tail comes with the last chunk."""

    def __init__(self, chunk_frames: int, delay_s: float) -> None:
        self._chunk_frames = chunk_frames
        self._delay_s = delay_s

    def open(self, request: StageRequest) -> WaveState:
        return WaveState(int(request.params.get("chunk_frames", self._chunk_frames)))

    def feed(self, state: WaveState, chunk: InputChunk) -> None:
        if "codes" in chunk.payload.tensors:
            state.codes += chunk.payload["codes"].tolist()
        state.closed = chunk.final
        chunk.payload.release()

    def pending(self, state: WaveState) -> int:
        if state.ended:
            return 0
        if state.closed:
            return max(1, min(state.chunk_frames, len(state.codes)))
        return state.chunk_frames if len(state.codes) >= state.chunk_frames else 0

    def run(self, states: list[WaveState]) -> list[list[Produced]]:
        pause(self._delay_s)
        return [[self._advance(state)] for state in states]

    def _advance(self, state: WaveState) -> Produced:
        codes, state.codes = state.codes[: state.chunk_frames], state.codes[state.chunk_frames :]
        state.ended = state.closed and not state.codes
        state.started = state.started or bool(codes)
        state.frames += len(codes)
        samples = np.zeros(len(codes) * SAMPLES_PER_CODE + TAIL_SAMPLES, np.float32)
        samples[:TAIL_SAMPLES] += state.tail
        for index, code in enumerate(codes):
            start = index * SAMPLES_PER_CODE
            samples[start : start + SAMPLES_PER_CODE + TAIL_SAMPLES] += tone(code)
        keep = len(samples) if state.ended and state.started else len(codes) * SAMPLES_PER_CODE
        state.tail = samples[-TAIL_SAMPLES:].copy()
        audio = MultimodalPayload.of({"sample_rate": SAMPLE_RATE}, audio=samples[None, :keep])
        return Produced(port="audio", payload=audio, final=state.ended)

    def done(self, state: WaveState) -> bool:
        return state.ended

    def metrics(self, state: WaveState) -> StageMetrics:
        return StageMetrics(extra={"frames": float(state.frames)})

    def close(self, state: WaveState) -> None:
        """Holds nothing."""


def _delay(context: StageContext) -> float:
    return float(context.stage.options["step_delay_s"])


def thinker(context: StageContext) -> ARBackend[ThinkerState]:
    return EchoThinker(limits_of(context, EOS), _delay(context))


def talker(context: StageContext) -> ARBackend[TalkerState]:
    return EchoTalker(limits_of(context, _TALKER_EOS), _delay(context))


def wave(context: StageContext) -> GenerationModel[WaveState]:
    return EchoWave(int(context.stage.options["chunk_frames"]), _delay(context))
