"""Chat completions through the official client and as raw events."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from omnistage.errors import ErrorCode, ErrorInfo, OmniError, RequestError
from omnistage.media.audio_decode import decode_audio
from omnistage.request import FinishReason, OmniRequest, OmniRequestOutput
from tests.entrypoints.http.conftest import Running, Start
from tests.entrypoints.http.fake_engine import (
    FakeEngine,
    Media,
    audio_event,
    last_event,
    speech_of,
    text_event,
)

HELLO = [{"role": "user", "content": "Hi"}]
MAGIC = {"wav": b"RIFF", "mp3": b"ID3", "flac": b"fLaC", "opus": b"OggS", "aac": b"\xff\xf1"}


async def raw_events(server: Running, **body: object) -> list[dict]:
    """Data of all events; the last must be [DONE]."""
    answer = await server.http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block[6:]) for block in blocks]


def check_grammar(events: list[dict], choices: int = 1) -> None:
    """Role first, exactly one finish reason per choice, which is its last chunk; usage at most once, last."""
    for event in events:
        ChatCompletionChunk.model_validate(event)
    rows = [choice for event in events for choice in event["choices"]]
    for index in range(choices):
        mine = [row for row in rows if row["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [row["finish_reason"] is not None for row in mine] == [False] * (len(mine) - 1) + [True]
        assert sum("role" in row["delta"] for row in mine) == 1
    with_usage = [i for i, event in enumerate(events) if event.get("usage")]
    assert with_usage in ([], [len(events) - 1])
    assert len({event["id"] for event in events}) == 1


async def test_whole_answer(server: Running) -> None:
    answer = await server.client.chat.completions.create(model="fake-model", messages=HELLO)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (
        "Hello big world",
        "assistant",
        "stop",
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 3, 10)
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.model == "fake-model"
    assert answer.id.startswith("chatcmpl-")
    assert server.engine.requests[0].modalities == ("text",)


async def test_streamed_answer(server: Running) -> None:
    stream = await server.client.chat.completions.create(model="fake-model", messages=HELLO, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello big world"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_stream_grammar_with_usage(server: Running) -> None:
    events = await raw_events(server, stream_options={"include_usage": True})
    check_grammar(events)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 10
    assert all(event["usage"] is None for event in events[:-1])


async def test_stream_without_usage_has_no_usage_key(server: Running) -> None:
    events = await raw_events(server)
    check_grammar(events)
    assert all("usage" not in event for event in events)


async def test_spoken_answer_has_audio_and_transcript_in_one_choice(server: Running) -> None:
    answer = await server.client.chat.completions.create(
        model="fake-model", messages=HELLO, modalities=["text", "audio"], audio={"voice": "heart", "format": "wav"}
    )
    assert len(answer.choices) == 1
    audio = answer.choices[0].message.audio
    assert audio is not None
    assert audio.transcript == "Hello big world"
    decoded = decode_audio(base64.b64decode(audio.data), 10)
    np.testing.assert_allclose(decoded.samples, np.concatenate([speech_of(1)] * 3, axis=1), atol=1e-4)
    request = server.engine.requests[0]
    assert (request.voice, request.modalities) == ("heart", ("text", "audio"))


@pytest.mark.parametrize("name", sorted(MAGIC))
async def test_audio_format_is_honoured(server: Running, name: str) -> None:
    for stream in (False, True):
        data = await spoken_bytes(server, name, stream)
        assert data.startswith(MAGIC[name])
        assert decode_audio(data, 10).seconds == pytest.approx(0.75, abs=0.12)


async def spoken_bytes(server: Running, name: str, stream: bool) -> bytes:
    body = {"modalities": ["text", "audio"], "audio": {"format": name}}
    if stream:
        events = await raw_events(server, **body)
        deltas = [row["delta"].get("audio", {}) for event in events for row in event["choices"]]
        return b"".join(base64.b64decode(delta["data"]) for delta in deltas if "data" in delta)
    answer = await server.http.post("/v1/chat/completions", json={"messages": HELLO, **body})
    return base64.b64decode(answer.json()["choices"][0]["message"]["audio"]["data"])


async def test_streamed_speech_as_openai_streams_it(server: Running) -> None:
    stream = await server.client.chat.completions.create(
        model="fake-model",
        messages=HELLO,
        modalities=["text", "audio"],
        audio={"voice": {"id": "joe"}, "format": "pcm16"},
        stream=True,
    )
    deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
    audio = [delta.audio for delta in deltas if delta.audio is not None]
    pcm = b"".join(base64.b64decode(part.data) for part in audio if part.data)
    assert len({part.id for part in audio}) == 1
    assert "".join(part.transcript or "" for part in audio) == "Hello big world"
    assert len(pcm) == 2 * 18_000
    assert audio[-1].expires_at
    assert all(part.expires_at is None for part in audio[:-1])
    assert server.engine.requests[0].voice == "joe"
    check_grammar(await raw_events(server, modalities=["audio"], audio={"format": "pcm16"}))


async def test_speech_starts_before_the_last_word(server: Running) -> None:
    events = await raw_events(server, modalities=["text", "audio"], audio={"format": "pcm16"})
    kinds = [key for event in events for row in event["choices"] for key in row["delta"].get("audio", {})]
    last_word = len(kinds) - 1 - kinds[::-1].index("transcript")
    assert kinds.index("data") < last_word


async def test_streamed_wav_is_one_file_with_one_header(server: Running) -> None:
    data = await spoken_bytes(server, "wav", stream=True)
    assert data.count(b"RIFF") == 1
    assert decode_audio(data, 10).samples.shape == (1, 18_000)


async def silent(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
    yield last_event(request)


async def test_answer_without_tokens_is_a_valid_answer(start: Start) -> None:
    server = await start(FakeEngine(silent))
    answer = await server.client.chat.completions.create(model="fake-model", messages=HELLO)
    assert answer.choices[0].message.content == ""
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 7
    events = await raw_events(server, modalities=["text", "audio"], audio={"format": "wav"})
    check_grammar(events)


async def test_choices_have_own_seeds_and_texts(start: Start) -> None:
    async def seeded(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        yield text_event(request, str(request.seed))
        yield last_event(request, FinishReason.LENGTH, tokens=1)

    server = await start(FakeEngine(seeded))
    answer = await server.client.chat.completions.create(model="fake-model", messages=HELLO, n=3, seed=5)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts[0] == "5"
    assert len(set(texts)) == 3
    assert [choice.seed for choice in answer.choices] == [int(text) for text in texts]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 3)
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    again = await server.client.chat.completions.create(model="fake-model", messages=HELLO, n=3, seed=5)
    assert [choice.message.content for choice in again.choices] == texts


async def test_streamed_choices_keep_their_grammar(server: Running) -> None:
    events = await raw_events(server, n=4, stream_options={"include_usage": True})
    check_grammar(events, choices=4)
    for index in range(4):
        rows = [row for event in events for row in event["choices"] if row["index"] == index]
        assert "".join(row["delta"].get("content", "") for row in rows) == "Hello big world"
    assert events[-1]["usage"]["completion_tokens"] == 12


async def test_sampling_reaches_the_text_stage(server: Running) -> None:
    await server.client.chat.completions.create(
        model="fake-model",
        messages=HELLO,
        temperature=1.0,
        top_p=0.5,
        stop=["a", "b"],
        seed=-3,
        frequency_penalty=0.1,
        presence_penalty=-0.1,
        logit_bias={"12": -100},
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=9,
        user="u",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        extra_body={"top_k": 4, "sampling": {"code2wav": {"temperature": 0}}, "priority": 2, "timeout": 9.5},
    )
    request = server.engine.requests[0]
    assert request.sampling[""] == {
        "temperature": 1.0,
        "top_p": 0.5,
        "top_k": 4,
        "stop": ["a", "b"],
        "frequency_penalty": 0.1,
        "presence_penalty": -0.1,
        "logit_bias": {"12": -100.0},
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 9,
    }
    assert request.sampling["code2wav"] == {"temperature": 0}
    assert (request.seed, request.priority, request.timeout) == (-3, 2, 9.5)


async def test_whole_answers_may_be_replayed_and_streamed_ones_may_not(server: Running) -> None:
    for stream in (False, True):
        await server.http.post("/v1/chat/completions", json={"messages": HELLO, "stream": stream})
        await server.http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        await server.http.post("/v1/audio/speech", json={"input": "x", "stream": stream})
        assert [request.stream for request in server.engine.requests[-3:]] == [stream] * 3


async def test_nothing_is_set_that_was_not_asked_for(server: Running) -> None:
    await server.client.chat.completions.create(model="fake-model", messages=HELLO)
    assert server.engine.requests[0].sampling == {"": {}}


async def test_logprobs_in_openai_shape(start: Start) -> None:
    async def sure(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        top = [{"token": "é", "logprob": -0.1}, {"token": "e", "logprob": -2.5}]
        yield text_event(request, "é", 0, {"logprobs": [{"token": "é", "logprob": -0.1, "top_logprobs": top}]})
        yield last_event(request, tokens=1)

    server = await start(FakeEngine(sure))
    answer = await server.client.chat.completions.create(
        model="fake-model", messages=HELLO, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    entry = answer.choices[0].logprobs.content[0]
    assert (entry.token, entry.logprob, entry.bytes) == ("é", -0.1, [195, 169])
    assert [top.token for top in entry.top_logprobs] == ["é", "e"]
    events = await raw_events(server, logprobs=True)
    assert sum(len(row["logprobs"]["content"]) for e in events for row in e["choices"] if row["logprobs"]) == 1


async def test_earlier_spoken_answer_is_known_by_its_id(server: Running) -> None:
    first = await server.client.chat.completions.create(
        model="fake-model", messages=HELLO, modalities=["text", "audio"], audio={"voice": "heart", "format": "pcm16"}
    )
    audio = first.choices[0].message.audio
    assert audio is not None
    turns = [*HELLO, {"role": "assistant", "audio": {"id": audio.id}}, {"role": "user", "content": "More"}]
    await server.client.chat.completions.create(model="fake-model", messages=turns)
    assert (server.engine.requests[-1].messages or [])[1] == {"role": "assistant", "content": "Hello big world"}


async def test_returned_message_can_be_sent_back_as_it_is(server: Running) -> None:
    for extra in ({}, {"modalities": ["text", "audio"], "audio": {"voice": "heart", "format": "mp3"}}):
        first = await server.client.chat.completions.create(model="fake-model", messages=HELLO, **extra)
        turns = [*HELLO, first.choices[0].message, {"role": "user", "content": "More"}]
        await server.client.chat.completions.create(model="fake-model", messages=turns)
        dumped = [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "More"}]
        await server.client.chat.completions.create(model="fake-model", messages=dumped)
        assert (server.engine.requests[-1].messages or [])[1]["content"] == "Hello big world"


async def test_unknown_audio_id_is_refused(server: Running) -> None:
    turns = [*HELLO, {"role": "assistant", "audio": {"id": "audio_nope"}}, {"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="no spoken answer") as caught:
        await server.client.chat.completions.create(model="fake-model", messages=turns)
    assert caught.value.param == "messages[1].audio.id"


async def test_input_audio_reaches_the_engine_as_samples(server: Running) -> None:
    from omnistage.media.audio_encode import encode_audio

    data = base64.b64encode(encode_audio("wav", speech_of(2), 24_000)).decode()
    parts = [
        {"type": "text", "text": "What is said?"},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
    ]
    await server.client.chat.completions.create(model="fake-model", messages=[{"role": "user", "content": parts}])
    request, media = server.engine.requests[0], server.engine.media[0]
    assert request.messages == [
        {"role": "user", "content": [{"type": "text", "text": "What is said?"}, {"type": "audio", "media": "audio0"}]}
    ]
    np.testing.assert_allclose(media["audio0"]["audio"], speech_of(2), atol=1e-4)
    assert media["audio0"].meta == {"sample_rate": 24_000}


async def test_metrics_and_seed_come_on_request(server: Running) -> None:
    body = {"messages": HELLO, "return_metrics": True}
    choice = (await server.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert choice["seed"] == 99
    assert choice["metrics"]["stages"]["thinker"]["output_tokens"] == 3
    events = await raw_events(server, return_metrics=True)
    assert events[-1]["choices"][0]["metrics"]["e2el_s"] == 0.5
    plain = (await server.http.post("/v1/chat/completions", json={"messages": HELLO})).json()
    assert "metrics" not in plain["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_by_the_engine_is_an_http_error_even_when_streaming(start: Start, stream: bool) -> None:
    async def refuse(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        raise RequestError("prompt has 9000 tokens, limit 2048", param="messages")
        yield

    server = await start(FakeEngine(refuse))
    with pytest.raises(openai.BadRequestError, match="9000") as caught:
        await server.client.chat.completions.create(model="fake-model", messages=HELLO, stream=stream)
    assert caught.value.param == "messages"


async def test_overload_is_429_with_retry_after(start: Start) -> None:
    async def busy(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        raise OmniError("queue is full", code=ErrorCode.OVERLOADED, retry_after_s=2.2)
        yield

    server = await start(FakeEngine(busy))
    with pytest.raises(openai.RateLimitError) as caught:
        await server.client.chat.completions.create(model="fake-model", messages=HELLO, n=2)
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.code == "overloaded"


async def test_failure_in_mid_stream_is_an_error_event_then_done(start: Start) -> None:
    async def dies(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        yield text_event(request, "Hel")
        error = ErrorInfo(ErrorCode.STAGE_DIED, "stage thinker died", stage="thinker")
        yield OmniRequestOutput(request_id=request.id, finished=True, finish_reason=FinishReason.ERROR, error=error)

    server = await start(FakeEngine(dies))
    events = await raw_events(server)
    assert events[-1]["error"]["code"] == "stage_died"
    assert events[-1]["error"]["stage"] == "thinker"
    assert all(row["finish_reason"] is None for event in events[:-1] for row in event["choices"])
    stream = await server.client.chat.completions.create(model="fake-model", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="stage thinker died"):
        _ = [chunk async for chunk in stream]
    whole = await server.http.post("/v1/chat/completions", json={"messages": HELLO})
    assert whole.status_code == 502


async def test_defect_of_the_server_tells_the_client_nothing(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        yield text_event(request, "Hel")
        raise ValueError(f"secret {object()!r} at /usr/lib/x.py")

    server = await start(FakeEngine(broken))
    whole = await server.http.post("/v1/chat/completions", json={"messages": HELLO})
    assert whole.status_code == 500
    assert "secret" not in whole.text
    assert "0x" not in whole.text
    events = await raw_events(server)
    assert events[-1]["error"]["code"] == "internal_error"
    assert "secret" in caplog.text


async def test_aborted_by_the_operator_is_an_error(start: Start) -> None:
    async def aborted(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        yield last_event(request, FinishReason.ABORT)

    server = await start(FakeEngine(aborted))
    assert (await server.http.post("/v1/chat/completions", json={"messages": HELLO})).status_code == 499


async def test_one_failing_choice_ends_the_others(start: Start) -> None:
    async def mixed(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        yield text_event(request, "a")
        if request.id.endswith("-1"):
            raise OmniError("stage failed", code=ErrorCode.STAGE_FAILED, stage="thinker")
        for seq in range(10**6):
            yield text_event(request, "b", seq)

    server = await start(FakeEngine(mixed))
    answer = await server.http.post("/v1/chat/completions", json={"messages": HELLO, "n": 3})
    assert answer.status_code == 500
    assert not server.engine.live
    assert len(server.engine.closed_early) == 3


async def test_every_payload_is_released_once(start: Start) -> None:
    released: list[int] = []

    async def counted(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        for seq in range(5):
            event = audio_event(request, speech_of(1), seq)
            assert event.payload is not None
            event.payload._on_release = lambda: released.append(1)
            yield event
        yield last_event(request)

    server = await start(FakeEngine(counted))
    for stream in (False, True):
        body = {"messages": HELLO, "modalities": ["audio"], "stream": stream, "n": 2}
        assert (await server.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert len(released) == 2 * 2 * 5
