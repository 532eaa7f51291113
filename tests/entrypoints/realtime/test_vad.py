"""The rule that makes turns out of probabilities, the detector around it, and the buffer that is cut by it."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.entrypoints.realtime.input_buffer import InputBuffer
from omnistage.entrypoints.realtime.vad import (
    VAD_RATE,
    WINDOW,
    SpeechEvent,
    SpeechStarted,
    SpeechStopped,
    TurnDetector,
    TurnRule,
)

WINDOW_MS = 32


class Scripted:
    """Says that a window is speech when its samples are loud."""

    def process_samples(self, samples: list[float]) -> float:
        return 0.9 if max(samples) > 0.1 else 0.0


def turns(probabilities: list[float], silence_ms: int = 96) -> list[SpeechEvent | None]:
    rule = TurnRule(0.5, 300, silence_ms)
    return [rule.note(p, i * WINDOW_MS, (i + 1) * WINDOW_MS) for i, p in enumerate(probabilities)]


def test_turn_begins_the_padding_before_speech_and_ends_after_the_silence() -> None:
    events = turns([0.0] * 20 + [0.9] * 5 + [0.0] * 5)
    assert [(i, e) for i, e in enumerate(events) if e] == [(20, SpeechStarted(340)), (27, SpeechStopped(28 * 32))]


def test_padding_never_reaches_before_the_first_sample() -> None:
    assert turns([0.9])[0] == SpeechStarted(0)


def test_short_pauses_and_voices_at_the_edge_do_not_end_a_turn() -> None:
    assert not any(turns([0.9, 0.0, 0.0, 0.9, 0.4, 0.4, 0.4, 0.4, 0.0, 0.0, 0.9])[1:])


@pytest.mark.parametrize("piece", [1, 100, 480, 24_000])
def test_turns_do_not_depend_on_the_size_of_the_pieces(piece: int) -> None:
    sound = np.zeros((1, 48_000), np.float32)
    sound[:, 12_000:24_000] = np.sin(np.arange(12_000) / 5, dtype=np.float32)
    detector = TurnDetector(24_000, TurnRule(0.5, 0, 200), 1000, Scripted())
    events = [e for i in range(0, 48_000, piece) for e in detector.feed(sound[:, i : i + piece])]
    started, stopped = events
    assert abs(started.audio_ms - 1500) <= WINDOW_MS
    assert abs(stopped.audio_ms - 2200) <= 2 * WINDOW_MS


def test_silero_hears_no_speech_in_silence_and_in_a_tone() -> None:
    detector = TurnDetector(VAD_RATE, TurnRule(0.5, 0, 200), 0)
    tone = 0.3 * np.sin(np.arange(20 * WINDOW, dtype=np.float32) * 0.2)
    assert detector.feed(np.zeros((1, 20 * WINDOW), np.float32)) == []
    assert detector.feed(tone[None]) == []


def test_buffer_gives_session_times_whatever_was_dropped_before() -> None:
    buffer = InputBuffer(1000, 500)
    buffer.append(np.arange(100, dtype=np.float32)[None])
    assert buffer.end_ms == 600
    buffer.keep_last(50)
    assert buffer.held_ms == 50
    assert buffer.take(560, 570)[0].tolist() == list(range(60, 70))
    assert buffer.take()[0].tolist() == list(range(70, 100))
    assert (buffer.held_ms, buffer.end_ms) == (0, 600)
