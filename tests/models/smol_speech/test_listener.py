"""The listener over a recogniser that knows what it hears: parts, windows, deltas, segments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from omnistage.errors import RequestError
from omnistage.models.smol_speech.hearing import Heard, Phrase, Question
from omnistage.models.smol_speech.listener import Listener, ListenerState
from omnistage.models.smol_speech.windows import SAMPLE_RATE
from omnistage.payload import MultimodalPayload
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.generation.model import Produced


class Counting:
    """Hears how many whole seconds a window has."""

    def __init__(self) -> None:
        self.questions: list[Question] = []

    def hear(self, questions: Sequence[Question]) -> list[Heard]:
        self.questions += questions
        return [self._hear(len(question.audio) / SAMPLE_RATE) for question in questions]

    def _hear(self, seconds: float) -> Heard:
        text = f"{seconds:.0f}s" if seconds else ""
        return Heard(text, [Phrase(0.0, round(seconds, 2), text)] if text else [], 3)


def run(seconds: list[float], rate: int = SAMPLE_RATE, **params: Any) -> tuple[list[Produced], ListenerState, Counting]:
    recogniser = Counting()
    model = Listener(recogniser)  # type: ignore[arg-type]
    state = model.open(StageRequest(request_id="r", params=params))
    arrays = {f"audio.{i}": np.ones((1, int(s * rate)), np.float32) for i, s in enumerate(seconds)}
    payload = MultimodalPayload.of({"sample_rates": [rate] * len(seconds)}, **arrays)
    model.feed(state, InputChunk(request_id="r", port="audio", seq=0, final=True, payload=payload))
    produced: list[Produced] = []
    while model.pending(state):
        produced += model.run([state])[0]
    assert model.done(state)
    return produced, state, recogniser


def test_a_conversation_gets_one_text_per_recording() -> None:
    produced, _, _ = run([2.0, 35.0, 4.0])
    texts = [text for item in produced for text in item.payload.meta["texts"]]
    assert texts[0] == "2s"
    assert texts[2] == "4s"
    assert len(texts[1].split()) == 2
    assert [item.final for item in produced] == [False, False, True]


def test_an_empty_recording_gets_an_empty_text() -> None:
    produced, _, _ = run([0.0])
    assert [(item.payload.meta, item.final) for item in produced] == [({"texts": [""]}, True)]


def test_a_transcription_gives_deltas_and_segments_in_recording_time() -> None:
    produced, state, _ = run([70.0], transcribes=True)
    assert "".join(item.payload.meta["text"] for item in produced).split() == [
        segment["text"] for item in produced for segment in item.payload.meta["segments"]
    ]
    segments = [segment for item in produced for segment in item.payload.meta["segments"]]
    assert segments[0]["start"] == 0.0
    assert segments[-1]["end"] == 70.0
    assert all(a["end"] == pytest.approx(b["start"], abs=0.02) for a, b in itertools.pairwise(segments))
    assert state.audio_s == 70.0


def test_other_rates_are_heard_at_16_khz() -> None:
    _, _, recogniser = run([2.0], rate=44100)
    assert abs(len(recogniser.questions[0].audio) - 2 * SAMPLE_RATE) <= 1


def test_parameters_reach_every_window() -> None:
    _, _, recogniser = run([40.0], transcribes=True, prompt="Ada", temperature=0.5, timestamps=True)
    assert [(q.prompt, q.temperature, q.timestamps) for q in recogniser.questions] == [("Ada", 0.5, True)] * 2
    assert len({q.seed for q in recogniser.questions}) == 2


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(RequestError):
        run([1.0], surprise=True)


def test_a_recording_without_a_rate_is_refused() -> None:
    model = Listener(Counting())  # type: ignore[arg-type]
    state = model.open(StageRequest(request_id="r"))
    payload = MultimodalPayload.of({}, **{"audio.0": np.ones((1, 10), np.float32)})
    with pytest.raises(RequestError, match="sample rate"):
        model.feed(state, InputChunk(request_id="r", port="audio", seq=0, final=True, payload=payload))
