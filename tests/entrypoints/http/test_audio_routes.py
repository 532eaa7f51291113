"""Speech, transcriptions and voices."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from omnistage.entrypoints.http.answers import Segment
from omnistage.entrypoints.http.subtitles import to_srt, to_vtt
from omnistage.errors import ErrorCode, OmniError
from omnistage.media.audio_decode import decode_audio
from omnistage.media.audio_encode import encode_audio
from omnistage.request import OmniRequest, OmniRequestOutput
from tests.entrypoints.http.conftest import Running, Start
from tests.entrypoints.http.fake_engine import FakeEngine, Media, audio_event, last_event, speech_of

MAGIC = {"wav": b"RIFF", "mp3": b"ID3", "flac": b"fLaC", "opus": b"OggS", "aac": b"\xff\xf1"}
TYPES = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm": "audio/pcm",
}
SPEECH = {"model": "fake-model", "input": "Hello big world", "voice": "heart"}


@pytest.mark.parametrize("mode", [{}, {"stream": False}, {"stream_format": "sse"}, {"stream_format": "audio"}])
@pytest.mark.parametrize("name", sorted(TYPES))
async def test_every_format_streamed_whole_and_as_events(server: Running, name: str, mode: dict) -> None:
    answer = await server.http.post("/v1/audio/speech", json={**SPEECH, "response_format": name, **mode})
    assert answer.status_code == 200
    data = answer.content
    if mode.get("stream_format") == "sse":
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line]
        assert [event["type"] for event in events[:-1]] == ["speech.audio.delta"] * (len(events) - 1)
        assert events[-1]["type"] == "speech.audio.done"
        assert events[-1]["usage"] == {"input_tokens": 7, "output_tokens": 103, "total_tokens": 110, "type": "tokens"}
        data = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    else:
        assert answer.headers["content-type"] == TYPES[name]
        assert ("content-length" in answer.headers) == (mode.get("stream") is False)
    if name == "pcm":
        assert len(data) == 2 * 18_000
    else:
        assert data.startswith(MAGIC[name])
        assert decode_audio(data, 10).seconds == pytest.approx(0.75, abs=0.12)


async def test_official_client_speaks_mp3_by_default(server: Running) -> None:
    answer = await server.client.audio.speech.create(model="fake-model", voice="joe", input="Hello", speed=1.5)
    assert answer.content.startswith(b"ID3")
    request = server.engine.requests[0]
    assert (request.task, request.prompt, request.voice, request.params) == ("speech", "Hello", "joe", {"speed": 1.5})


async def test_official_client_streams_bytes(server: Running) -> None:
    speech = server.client.audio.speech.with_streaming_response
    async with speech.create(model="fake-model", voice="joe", input="Hello", response_format="pcm") as answer:
        pieces = [piece async for piece in answer.iter_bytes()]
    assert sum(map(len, pieces)) == 2 * 18_000


async def test_whole_wav_has_exact_sizes_and_reports_its_seed(server: Running) -> None:
    body = {**SPEECH, "response_format": "wav", "stream": False, "return_metrics": True}
    answer = await server.http.post("/v1/audio/speech", json=body)
    with wave.open(io.BytesIO(answer.content)) as reader:
        assert reader.getnframes() == 18_000
    assert answer.headers["x-omnistage-seed"] == "99"
    assert json.loads(answer.headers["x-omnistage-metrics"])["e2el_s"] == 0.5


async def test_first_bytes_come_while_the_engine_still_speaks(start: Start) -> None:
    order: list[str] = []

    async def slow(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        yield audio_event(request, speech_of(2))
        await client_has_bytes.wait()
        order.append("engine goes on")
        yield audio_event(request, speech_of(2), 1)
        yield last_event(request)

    import asyncio

    client_has_bytes = asyncio.Event()
    server = await start(FakeEngine(slow))
    for name in ("wav", "pcm", "mp3", "opus", "aac", "flac"):
        client_has_bytes.clear()
        order.clear()
        async with server.http.stream("POST", "/v1/audio/speech", json={**SPEECH, "response_format": name}) as answer:
            async for piece in answer.aiter_raw():
                order += ["bytes"] if len(piece) > 10 else []
                client_has_bytes.set()
        assert order[0] == "bytes", name


async def test_failure_before_the_first_byte_is_an_http_error(start: Start) -> None:
    async def fails(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        raise OmniError("stage talker is restarting", code=ErrorCode.UNAVAILABLE, stage="talker")
        yield

    server = await start(FakeEngine(fails))
    for mode in ({}, {"stream": False}, {"stream_format": "sse"}):
        answer = await server.http.post("/v1/audio/speech", json={**SPEECH, **mode})
        assert answer.status_code == 503
        assert answer.json()["error"]["stage"] == "talker"


async def test_failure_after_the_first_byte_breaks_the_stream_visibly(start: Start) -> None:
    async def fails(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        yield audio_event(request, speech_of(2))
        raise OmniError("stage talker died", code=ErrorCode.STAGE_DIED, stage="talker")

    server = await start(FakeEngine(fails))
    with pytest.raises(httpx.RemoteProtocolError):
        await server.http.post("/v1/audio/speech", json={**SPEECH, "response_format": "pcm"})
    answer = await server.http.post("/v1/audio/speech", json={**SPEECH, "stream_format": "sse"})
    assert json.loads(answer.text.split("\n\n")[-2][6:])["error"]["code"] == "stage_died"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("voice", "../../etc/passwd"),
        ("voice", "alloy"),
        ("instructions", "whisper"),
        ("input", "x" * 4097),
        ("input", ""),
        ("speed", 4.1),
        ("response_format", "ogg"),
        ("model", "tts-1"),
        ("stream", "no"),
        ("return_metrics", True),
    ],
)
async def test_speech_field_that_cannot_be_honoured_is_named(server: Running, field: str, value: object) -> None:
    answer = await server.http.post("/v1/audio/speech", json={**SPEECH, field: value})
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["param"] == field
    assert not server.engine.requests


async def test_voices_are_listed(server: Running) -> None:
    answer = await server.http.get("/v1/audio/voices")
    assert answer.json() == {"voices": ["heart", "joe"], "uploaded_voices": []}


def recording(name: str = "wav", words: int = 4) -> tuple[str, bytes]:
    return f"speech.{name}", encode_audio(name, speech_of(words), 24_000)


async def test_transcription_as_json(server: Running) -> None:
    answer = await server.client.audio.transcriptions.create(
        model="fake-model", file=recording("mp3"), language="en", prompt="names", temperature=0.2
    )
    assert answer.text == "Hello big world"
    assert answer.usage is not None
    request = server.engine.requests[0]
    assert request.params == {"language": "en", "prompt": "names", "temperature": 0.2}
    assert server.engine.media[0]["audio"]["audio"].shape[1] == pytest.approx(24_000, abs=10)


async def test_transcription_as_verbose_json(server: Running) -> None:
    answer = await server.client.audio.transcriptions.create(
        model="fake-model",
        file=recording(),
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        temperature=0.5,
    )
    type(answer).model_validate(answer.model_dump())
    assert (answer.language, answer.duration, answer.text) == ("en", 1.0, "Hello big world")
    assert [(s.id, s.start, s.end, s.temperature) for s in answer.segments] == [(0, 0.0, 0.5, 0.5), (1, 0.5, 1.0, 0.5)]


async def test_transcription_as_text_srt_and_vtt(server: Running) -> None:
    results = {}
    for name in ("text", "srt", "vtt"):
        results[name] = await server.client.audio.transcriptions.create(
            model="fake-model", file=recording(), response_format=name
        )
    assert results["text"] == "Hello big world\n"
    assert results["srt"].startswith("1\n00:00:00,000 --> 00:00:00,500\nHello big\n\n2\n")
    assert results["vtt"].startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.500\nHello big\n")


async def test_transcription_as_events(server: Running) -> None:
    stream = await server.client.audio.transcriptions.create(model="fake-model", file=recording(), stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "transcript.text.delta",
        "transcript.text.delta",
        "transcript.text.done",
    ]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == "Hello big world"
    assert events[-1].usage.output_tokens == 102


async def test_words_are_refused_when_the_model_has_none(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await server.client.audio.transcriptions.create(
            model="fake-model", file=recording(), response_format="verbose_json", timestamp_granularities=["word"]
        )
    assert caught.value.param == "timestamp_granularities"


@pytest.mark.parametrize(
    ("files", "data", "param"),
    [
        ({"file": ("a.wav", b"not audio at all")}, {}, "file"),
        ({"file": ("a.wav", b"")}, {}, "file"),
        ({"image": ("a.png", b"x")}, {}, "image"),
        ({"file": recording()}, {"temperature": "2"}, "temperature"),
        ({"file": recording()}, {"temperature": "warm"}, "temperature"),
        ({"file": recording()}, {"language": "../x"}, "language"),
        ({"file": recording()}, {"response_format": "xml"}, "response_format"),
        ({"file": recording()}, {"stream": "perhaps"}, "stream"),
        ({"file": recording()}, {"unheard_of": "1"}, "unheard_of"),
        ({"file": recording()}, {"model": "whisper-1"}, "model"),
        ({"file": recording()}, {"timestamp_granularities[]": "segment"}, "timestamp_granularities"),
        ({"file": recording()}, {"stream": "true", "response_format": "srt"}, "stream"),
        ({"file": recording(words=2500)}, {}, "file"),
    ],
)
async def test_transcription_field_at_fault_is_named(server: Running, files: dict, data: dict, param: str) -> None:
    answer = await server.http.post("/v1/audio/transcriptions", files=files, data=data)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["param"] == param
    assert not server.engine.requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"--b\r\n",
        b"rubbish",
        b"--b\r\ncontent-disposition: form-data\r\n\r\nx\r\n--b--\r\n",
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\nabc',
        b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n\xff\xfe\r\n--b--\r\n',
        b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\nno file part\r\n--b--\r\n',
        b"--b\r\n" + b"x" * 9000 + b": y\r\n\r\n\r\n--b--\r\n",
        b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n' * 70 + b"--b--\r\n",
        b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n' + b"m" * (1 << 21) + b"\r\n--b--\r\n",
    ],
)
async def test_broken_forms_are_400(server: Running, body: bytes) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = await server.http.post("/v1/audio/transcriptions", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"]


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "multipart/mixed; boundary=b", '";"', ""])
async def test_form_of_another_kind_is_400(server: Running, kind: str) -> None:
    answer = await server.http.post("/v1/audio/transcriptions", content=b"{}", headers={"content-type": kind})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "content-type"


def test_subtitle_clock_carries_over_the_hour_and_never_holds_an_arrow() -> None:
    segments = [Segment(start=3599.9996, end=3723.004, text=" a --> b\nc ")]
    assert to_srt(segments) == "1\n01:00:00,000 --> 01:02:03,004\na -> b c\n"
    assert to_vtt(segments) == "WEBVTT\n\n01:00:00.000 --> 01:02:03.004\na -> b c\n"


def test_subtitles_of_silence_are_valid() -> None:
    assert to_srt([]) == ""
    assert to_vtt([]) == "WEBVTT\n"
