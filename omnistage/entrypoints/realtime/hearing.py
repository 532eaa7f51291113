"""The input side of a session: microphone buffer, voice activity, and what becomes of a turn of speech."""

from __future__ import annotations

from typing import Protocol

from omnistage.entrypoints.http.state import ServerState, new_id
from omnistage.entrypoints.realtime.events import AudioInput, ServerVad
from omnistage.entrypoints.realtime.formats import wire_format
from omnistage.entrypoints.realtime.input_buffer import InputBuffer
from omnistage.entrypoints.realtime.refusal import Refusal
from omnistage.entrypoints.realtime.response import Emit
from omnistage.entrypoints.realtime.vad import SpeechEvent, SpeechStarted, TurnDetector, TurnRule
from omnistage.media.data_url import decode_base64
from omnistage.media.samples import FloatAudio

MIN_COMMIT_MS = 100


class Turns(Protocol):
    """What the session does about turns."""

    async def interrupted(self) -> None:
        """The user began to speak."""
        ...

    async def heard(self, item_id: str, samples: FloatAudio, rate: int) -> None:
        """Audio was committed as an item."""
        ...

    async def answer(self) -> None:
        """A turn is over that wants an answer."""
        ...


class Hearing:
    """Owns the audio that has not been committed. Used by one task."""

    def __init__(self, state: ServerState, settings: AudioInput, emit: Emit, turns: Turns) -> None:
        self._state, self._emit, self._turns = state, emit, turns
        self._settings = settings
        self.format = wire_format(settings.format.type)
        self._buffer = InputBuffer(self.format.rate)
        self._detector: TurnDetector | None = None
        self._started_ms = 0
        self._item_id: str | None = None

    def configure(self, settings: AudioInput) -> None:
        """Takes new settings. Raises Refusal when the format changes under audio that is not committed."""
        if settings.format.type != self._settings.format.type:
            in_turn = self._item_id is not None or self._settings.turn_detection is None
            if self._buffer.held_ms and in_turn:
                message = "commit or clear the input audio buffer before its format changes"
                raise Refusal("invalid_value", message, "session.audio.input.format")
            self.format = wire_format(settings.format.type)
            self._reset(self._buffer.end_ms)
        elif settings.turn_detection != self._settings.turn_detection:
            self._detector = self._item_id = None
        self._settings = settings

    async def append(self, text: str) -> None:
        """Audio from the client, base64. Raises RequestError for bad data, Refusal for too much of it."""
        samples = self.format.decode(decode_base64(text, self._state.max_body, "audio"))
        limit_s = self._state.limits.max_audio_s
        if self._buffer.held_ms / 1000 + samples.shape[1] / self.format.rate > limit_s:
            raise Refusal("input_audio_buffer_full", f"audio: more than {limit_s} s are not committed", "audio")
        self._buffer.append(samples)
        vad = self._settings.turn_detection
        if vad is None:
            return
        for event in await self._detect(vad, samples):
            await self._turn(event, vad)
        if self._item_id is None:
            self._buffer.keep_last(vad.prefix_padding_ms + 32)

    async def _detect(self, vad: ServerVad, samples: FloatAudio) -> list[SpeechEvent]:
        if self._detector is None:
            rule = TurnRule(vad.threshold, vad.prefix_padding_ms, vad.silence_duration_ms)
            start_ms = self._buffer.end_ms - samples.shape[1] * 1000 // self.format.rate
            self._detector = await self._state.run(TurnDetector, self.format.rate, rule, start_ms)
        return await self._state.run(self._detector.feed, samples)

    async def _turn(self, event: SpeechEvent, vad: ServerVad) -> None:
        if isinstance(event, SpeechStarted):
            self._started_ms, self._item_id = event.audio_ms, new_id("item_")
            kind = "input_audio_buffer.speech_started"
            await self._emit(kind, audio_start_ms=event.audio_ms, item_id=self._item_id)
            if vad.interrupt_response:
                await self._turns.interrupted()
            return
        item_id = self._item_id or new_id("item_")
        self._item_id = None
        await self._emit("input_audio_buffer.speech_stopped", audio_end_ms=event.audio_ms, item_id=item_id)
        await self._turns.heard(item_id, self._buffer.take(self._started_ms, event.audio_ms), self._buffer.rate)
        if vad.create_response:
            await self._turns.answer()

    async def commit(self) -> None:
        """The client ends a turn. Raises Refusal when there is (nearly) no audio."""
        if self._buffer.held_ms < MIN_COMMIT_MS:
            message = f"the buffer holds {self._buffer.held_ms:.0f} ms of audio; a commit needs {MIN_COMMIT_MS} ms"
            raise Refusal("input_audio_buffer_commit_empty", message)
        item_id = self._item_id or new_id("item_")
        samples = self._buffer.take()
        self._detector = self._item_id = None
        await self._turns.heard(item_id, samples, self._buffer.rate)

    async def clear(self) -> None:
        self._reset(self._buffer.end_ms)
        await self._emit("input_audio_buffer.cleared")

    def close(self) -> None:
        self._reset(0)

    def _reset(self, now_ms: int) -> None:
        self._buffer = InputBuffer(self.format.rate, now_ms)
        self._detector = self._item_id = None
