"""POST /v1/audio/transcriptions: speech to text as json, text, srt, verbose_json, vtt, or as events."""

from __future__ import annotations

import zlib
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET

from omnistage.entrypoints.http.answers import (
    DurationUsage,
    Segment,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    VerboseTranscription,
    Word,
)
from omnistage.entrypoints.http.asgi import JSON, Exchange
from omnistage.entrypoints.http.events import request_events
from omnistage.entrypoints.http.multipart import read_form
from omnistage.entrypoints.http.parse import convert_fields
from omnistage.entrypoints.http.result import audio_usage
from omnistage.entrypoints.http.schema import TranscriptionForm
from omnistage.entrypoints.http.sse import event, json_bytes
from omnistage.entrypoints.http.state import ServerState, new_id
from omnistage.entrypoints.http.subtitles import to_srt, to_vtt
from omnistage.errors import RequestError
from omnistage.media.jobs import DecodeJob
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, OmniRequestOutput, RequestMetrics

_PLAIN_TEXT = b"text/plain; charset=utf-8"
_SEGMENT_FORMATS = ("verbose_json", "srt", "vtt")


class Heard:
    """What the events of one transcription said so far. `seconds` is the length of the audio."""

    def __init__(self, seconds: float, language: str) -> None:
        self.seconds = seconds
        self.language = language
        self.metrics = RequestMetrics()
        self._parts = list[str]()
        self._segments = list[dict[str, Any]]()
        self._words = list[dict[str, Any]]()

    @property
    def text(self) -> str:
        return "".join(self._parts).strip()

    def note(self, output: OmniRequestOutput) -> str:
        """Takes an event; returns its text delta."""
        meta = output.payload.meta if output.payload is not None else {}
        delta = output.text or " ".join(meta.get("texts", ()))
        if delta and not output.text and self._parts and not delta[0].isspace():
            delta = " " + delta
        self._parts += [delta] if delta else []
        self._segments += meta.get("segments", ())
        self._words += meta.get("words", ())
        self.language = meta.get("language") or self.language
        if output.metrics is not None:
            self.metrics = output.metrics
        return delta

    def segments(self, temperature: float) -> list[Segment]:
        """Segments with their numbers; one over the whole audio when the model gave no times."""
        rows = self._segments or ([{"start": 0.0, "end": self.seconds, "text": self.text}] if self.text else [])
        defaults = {"temperature": temperature}
        segments = [msgspec.convert(defaults | row, Segment) for row in rows]
        for number, segment in enumerate(segments):
            segment.id = number
            segment.compression_ratio = segment.compression_ratio or _compression_ratio(segment.text)
        return segments

    def words(self) -> list[Word]:
        return [msgspec.convert(row, Word) for row in self._words]


def _compression_ratio(text: str) -> float:
    """Bytes of the text over bytes of its zlib form (Whisper's measure of repetition)."""
    raw = text.encode()
    return round(len(raw) / len(zlib.compress(raw)), 4)


async def transcriptions(state: ServerState, exchange: Exchange) -> None:
    """Answers one transcription request."""
    form = read_form(exchange)
    fields = convert_fields(dict(form.fields), TranscriptionForm)
    _check(state, fields, list(form.files))
    exchange.body = b""
    job = DecodeJob(kind="audio", limits=state.limits, param="file")
    payload = await state.decode(job, form.files["file"])
    heard = Heard(payload["audio"].shape[1] / payload.meta["sample_rate"], fields.language or "")
    await _answer(state, exchange, fields, payload, heard)


def _check(state: ServerState, fields: TranscriptionForm, files: list[str]) -> None:
    state.check_model(fields.model)
    state.check_task("transcription")
    for name in files:
        if name != "file":
            raise RequestError(f"{name}: unknown file field", param=name)
    if not files:
        raise RequestError("file: missing; send the audio as a file part", param="file")
    if fields.timestamp_granularities and fields.response_format != "verbose_json":
        raise RequestError(
            "timestamp_granularities needs response_format verbose_json", param="timestamp_granularities"
        )
    if "word" in fields.timestamp_granularities and "word_timestamps" not in state.capabilities.features:
        text = "timestamp_granularities: this model gives no times of words; use segment"
        raise RequestError(text, param="timestamp_granularities")
    if fields.stream and fields.response_format in _SEGMENT_FORMATS:
        raise RequestError("stream: only with response_format json or text", param="stream")


def _request(fields: TranscriptionForm) -> OmniRequest:
    given = {"language": fields.language, "prompt": fields.prompt, "temperature": fields.temperature}
    params: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "word" in fields.timestamp_granularities:
        params["word_timestamps"] = True
    return OmniRequest(
        id=new_id("transcript-"),
        task="transcription",
        modalities=("text",),
        seed=fields.seed,
        priority=fields.priority,
        timeout=fields.timeout,
        stream=fields.stream,
        params=params,
    )


async def _answer(
    state: ServerState, exchange: Exchange, fields: TranscriptionForm, payload: MultimodalPayload, heard: Heard
) -> None:
    async with aclosing(request_events(state.engine, _request(fields), {"audio": payload})) as events:
        async for output in events:
            delta = heard.note(output)
            if fields.stream:
                await exchange.send_events(event(TranscriptDelta(delta)) if delta else b"")
    if fields.stream:
        await exchange.end(event(TranscriptDone(heard.text, audio_usage(heard.metrics))))
    else:
        await exchange.answer(200, *_render(fields, heard))


def _render(fields: TranscriptionForm, heard: Heard) -> tuple[bytes, bytes]:
    segments = heard.segments(fields.temperature or 0.0)
    match fields.response_format:
        case "json":
            return JSON, json_bytes(Transcription(heard.text, audio_usage(heard.metrics)))
        case "text":
            return _PLAIN_TEXT, heard.text.encode() + b"\n"
        case "srt":
            return _PLAIN_TEXT, to_srt(segments).encode()
        case "vtt":
            return b"text/vtt; charset=utf-8", to_vtt(segments).encode()
        case "verbose_json":
            return JSON, json_bytes(_verbose(fields, heard, segments))


def _verbose(fields: TranscriptionForm, heard: Heard, segments: list[Segment]) -> VerboseTranscription:
    return VerboseTranscription(
        language=heard.language,
        duration=round(heard.seconds, 3),
        text=heard.text,
        segments=segments,
        usage=DurationUsage(round(heard.seconds, 3)),
        words=heard.words() if "word" in fields.timestamp_granularities else UNSET,
    )
