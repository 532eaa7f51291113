"""The listener: speech to text, window by window; requests share the encoder and every decoding step.

Input port "audio": one chunk with tensors "audio.0", "audio.1", ... float32 [channels, samples] and `meta`
{"sample_rates": [...]}. Output port "transcript": for a conversation one chunk per recording, `meta` {"texts": [text]};
for a transcription one chunk per window, `meta` {"text": delta, "segments": [{"start", "end", "text"}], "language"},
times in seconds.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import numpy.typing as npt

from omnistage.config.model import StageContext
from omnistage.errors import RequestError
from omnistage.models.smol_speech.artefacts import LISTENER
from omnistage.models.smol_speech.hearing import Heard, Phrase, Question, Recogniser
from omnistage.models.smol_speech.windows import SAMPLE_RATE, split_windows, to_mono_16k
from omnistage.payload import MultimodalPayload
from omnistage.request import StageMetrics
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.generation.model import Produced

Array = npt.NDArray[Any]

LANGUAGE = "english"


class ListenerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request may ask of the listener. `transcribes`: the transcript is the answer itself."""

    transcribes: bool = False
    prompt: str = ""
    temperature: float = 0.0
    timestamps: bool = False


class Window(msgspec.Struct, frozen=True):
    """A piece of recording number `part`; `offset_s` is where it starts, `ends_part` marks the recording's last one."""

    audio: Array
    part: int
    offset_s: float
    ends_part: bool


class ListenerState:
    """One request: windows not heard yet, and the words of the recording that is being heard."""

    __slots__ = ("audio_s", "closed", "complete", "params", "parts", "seed", "texts", "tokens", "windows")

    def __init__(self, params: ListenerParams, seed: int) -> None:
        self.params = params
        self.seed = seed
        self.windows: deque[Window] = deque()
        self.parts = 0
        self.texts: list[str] = []
        self.complete = False
        self.closed = False
        self.audio_s = 0.0
        self.tokens = 0


class Listener:
    """A `GenerationModel`: each step hears the next window of every request in the batch."""

    def __init__(self, recogniser: Recogniser) -> None:
        self._recogniser = recogniser

    def open(self, request: StageRequest) -> ListenerState:
        try:
            params = msgspec.convert(request.params, ListenerParams)
        except msgspec.ValidationError as error:
            raise RequestError(f"listener: {error}", param="audio") from None
        return ListenerState(params, request.seed)

    def feed(self, state: ListenerState, chunk: InputChunk) -> None:
        payload = chunk.payload
        rates = payload.meta.get("sample_rates", [])
        if len(rates) != len(payload.tensors):
            raise RequestError("every recording needs a sample rate", param="audio")
        recordings = [to_mono_16k(payload[f"audio.{index}"], rate) for index, rate in enumerate(rates)]
        for recording in recordings:
            state.windows += _windows(recording, state.parts)
            state.parts += 1
            state.audio_s += len(recording) / SAMPLE_RATE
        state.complete = state.complete or chunk.final
        payload.release()

    def pending(self, state: ListenerState) -> int:
        """Windows to hear; one more step closes the port."""
        return 0 if state.closed else len(state.windows) + state.complete

    def run(self, states: list[ListenerState]) -> list[list[Produced]]:
        hearing = [index for index, state in enumerate(states) if state.windows]
        questions = [_question(states[index]) for index in hearing]
        answers = dict(zip(hearing, self._recogniser.hear(questions) if questions else [], strict=True))
        return [_commit(state, answers.get(index)) for index, state in enumerate(states)]

    def done(self, state: ListenerState) -> bool:
        return state.closed

    def metrics(self, state: ListenerState) -> StageMetrics:
        return StageMetrics(output_tokens=state.tokens, extra={"audio_s": round(state.audio_s, 3)})

    def close(self, state: ListenerState) -> None:
        state.windows.clear()


def create(context: StageContext) -> Listener:
    """Component factory of the stage `listener`."""
    device = "cpu" if context.stage.device == "auto" else context.stage.device
    return Listener(Recogniser(LISTENER.locate(context.model_path, context.config.cache_dir), device))


def _windows(recording: Array, part: int) -> list[Window]:
    """The windows of a recording; one of no length for an empty recording, so that it gets its (empty) text."""
    ranges = split_windows(recording) or [(0, 0)]
    last = ranges[-1]
    return [Window(recording[start:stop], part, start / SAMPLE_RATE, (start, stop) == last) for start, stop in ranges]


def _question(state: ListenerState) -> Question:
    params, window = state.params, state.windows[0]
    return Question(
        audio=window.audio,
        prompt=params.prompt,
        timestamps=params.timestamps,
        temperature=params.temperature,
        seed=state.seed + int(window.offset_s * SAMPLE_RATE),
    )


def _commit(state: ListenerState, heard: Heard | None) -> list[Produced]:
    meta: dict[str, Any] | None = None
    if heard is not None:
        window = state.windows.popleft()
        state.tokens += heard.tokens
        delta = f" {heard.text}" if state.texts and heard.text else heard.text
        state.texts += [heard.text] if heard.text else []
        if state.params.transcribes:
            segments = [_segment(phrase, window.offset_s) for phrase in heard.phrases]
            meta = {"text": delta, "segments": segments, "language": LANGUAGE}
        elif window.ends_part:
            meta = {"texts": [" ".join(state.texts)]}
            state.texts = []
    state.closed = state.complete and not state.windows
    if meta is None and not state.closed:
        return []
    return [Produced(port="transcript", payload=MultimodalPayload(meta=meta or {}), final=state.closed)]


def _segment(phrase: Phrase, offset_s: float) -> dict[str, Any]:
    return {"start": round(offset_s + phrase.start, 2), "end": round(offset_s + phrase.end, 2), "text": phrase.text}
