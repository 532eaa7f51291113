"""POST /v1/audio/speech: text to speech as bytes (streamed or whole) or as events. GET /v1/audio/voices."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from msgspec import UNSET

from omnistage.entrypoints.http.answers import SpeechDelta, SpeechDone, VoiceList
from omnistage.entrypoints.http.asgi import JSON, ClientDisconnected, ConnectionBroken, Exchange, Header
from omnistage.entrypoints.http.audio_out import AudioCollector, AudioStream, base64_text
from omnistage.entrypoints.http.events import request_events
from omnistage.entrypoints.http.inputs import check_chars, sampling_of, voice_of
from omnistage.entrypoints.http.parse import decode_json
from omnistage.entrypoints.http.result import audio_usage
from omnistage.entrypoints.http.schema import SpeechRequest
from omnistage.entrypoints.http.sse import event, json_bytes
from omnistage.entrypoints.http.state import ServerState, new_id
from omnistage.errors import OmniError, RequestError
from omnistage.media.audio_encode import AUDIO_FORMATS, PCM_RATE
from omnistage.request import OmniRequest, OmniRequestOutput, RequestMetrics


async def speech(state: ServerState, exchange: Exchange) -> None:
    """Answers one speech request."""
    body = decode_json(exchange, SpeechRequest)
    request = _request(state, body)
    if body.stream_format == "sse":
        await _events(state, exchange, body, request)
    elif body.stream is False:
        await _whole(state, exchange, body, request)
    else:
        await _bytes(state, exchange, body, request)


async def voices(state: ServerState, exchange: Exchange) -> None:
    """Lists the voices."""
    await exchange.answer(200, JSON, json_bytes(VoiceList(list(state.engine.pipeline.voices))))


def _request(state: ServerState, body: SpeechRequest) -> OmniRequest:
    state.check_model(body.model)
    state.check_task("speech")
    if body.stream is False and body.stream_format is not None:
        raise RequestError("stream_format asks for a stream that stream: false refuses", param="stream")
    if body.return_metrics and body.stream_format != "sse" and body.stream is not False:
        raise RequestError("return_metrics needs stream_format sse or stream: false", param="return_metrics")
    if body.instructions is not None and "instructions" not in state.capabilities.features:
        raise RequestError("instructions: this model's voices take no instructions", param="instructions")
    check_chars(len(body.input), state.limits, "input")
    params: dict[str, Any] = {} if body.instructions is None else {"instructions": body.instructions}
    return OmniRequest(
        id=new_id("speech-"),
        task="speech",
        prompt=body.input,
        modalities=("audio",),
        voice=voice_of(state, body.voice, "voice"),
        sampling=sampling_of(state, body),
        seed=body.seed,
        priority=body.priority,
        timeout=body.timeout,
        stream=body.stream is not False,
        params=params if body.speed == 1.0 else params | {"speed": body.speed},
    )


def _content(body: SpeechRequest) -> tuple[bytes, tuple[Header, ...]]:
    rate = str(PCM_RATE).encode()
    headers: tuple[Header, ...] = ((b"x-sample-rate", rate),) if body.response_format == "pcm" else ()
    return AUDIO_FORMATS[body.response_format].media_type.encode(), headers


async def _whole(state: ServerState, exchange: Exchange, body: SpeechRequest, request: OmniRequest) -> None:
    sound, last = AudioCollector(state, body.response_format), OmniRequestOutput(request_id=request.id)
    async with aclosing(request_events(state.engine, request, {})) as events:
        async for output in events:
            sound.feed(output.payload)
            last = output
    media_type, headers = _content(body)
    if last.seed is not None:
        headers = (*headers, (b"x-omnistage-seed", str(last.seed).encode()))
    if body.return_metrics:
        headers = (*headers, (b"x-omnistage-metrics", json_bytes(last.metrics or RequestMetrics())))
    await exchange.answer(200, media_type, await sound.encode(), headers)


async def _send_sound(
    state: ServerState, exchange: Exchange, body: SpeechRequest, request: OmniRequest, sound: AudioStream
) -> None:
    """Sends the encoded bytes of an answer as they come, the encoder's tail excepted."""
    media_type, headers = _content(body)
    async with aclosing(request_events(state.engine, request, {})) as events:
        async for output in events:
            data = await sound.feed(output.payload)
            if data and not exchange.started:
                await exchange.start(200, media_type, headers)
            if data:
                await exchange.write(data)


async def _bytes(state: ServerState, exchange: Exchange, body: SpeechRequest, request: OmniRequest) -> None:
    """Streams the file. A failure after the first byte breaks the connection: bytes cannot carry an error."""
    sound = AudioStream(state, body.response_format)
    media_type, headers = _content(body)
    try:
        await _send_sound(state, exchange, body, request, sound)
    except OmniError as error:
        if exchange.started:
            raise ConnectionBroken(error.info.message) from error
        raise
    rest = await sound.finish()
    if not exchange.started:
        await exchange.start(200, media_type, headers)
    await exchange.end(rest)


async def _events(state: ServerState, exchange: Exchange, body: SpeechRequest, request: OmniRequest) -> None:
    sound, last = AudioStream(state, body.response_format), OmniRequestOutput(request_id=request.id)
    async with aclosing(request_events(state.engine, request, {})) as events:
        async for output in events:
            last = output
            data = await sound.feed(output.payload)
            await exchange.send_events(event(SpeechDelta(base64_text(data))) if data else b"")
    if exchange.disconnected:
        raise ClientDisconnected
    rest = await sound.finish()
    metrics = last.metrics or RequestMetrics()
    done = SpeechDone(
        audio_usage(metrics),
        UNSET if last.seed is None else last.seed,
        metrics if body.return_metrics else UNSET,
    )
    await exchange.end((event(SpeechDelta(base64_text(rest))) if rest else b"") + event(done))
