"""Realtime sessions on the tiny checkpoint: text and sound in, text and speech out, equal to the same chat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from omnistage.entrypoints.omni import OmniResult, ResultBuilder
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from tests.engines import running
from tests.entrypoints.http.real import Running, serving_engine
from tests.entrypoints.realtime.talk import Talk, talking
from tests.models.qwen3_omni.reference import HELLO

RATE = 24_000
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
GREEDY = {"thinker": {"temperature": 0.0}, "talker": {"temperature": 0.0, "max_tokens": 12}}
DEPLOYMENT = {
    "dtype": "float32", "threads": 1, "device": "cpu", "kv_memory_mb": 8, "placement": "inline", "sampling": GREEDY,
}  # fmt: skip
MANUAL = {"audio": {"input": {"turn_detection": None}}, "max_output_tokens": 12}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(checkpoint: Path) -> AsyncIterator[Running]:
    async with running(str(checkpoint), DEPLOYMENT) as engine, serving_engine(engine) as server:
        yield server


def url(served: Running) -> str:
    return str(served.http.base_url).rstrip("/")


async def prepared(talk: Talk, **more: object) -> None:
    await talk.send("session.update", session=MANUAL | more)
    await talk.until("session.updated")


async def chat(served: Running, content: list[dict[str, str]], **media: MultimodalPayload) -> OmniResult:
    """The same question without a session."""
    messages = [{"role": "user", "content": content}]
    request = OmniRequest(id="chat", messages=messages, sampling={"": {"max_tokens": 12}})
    builder = ResultBuilder("chat")
    async for output in served.engine.generate(request, media):
        builder.add(output)
    return builder.result().raise_for_error()


def assert_told(talk: Talk, expected: OmniResult) -> None:
    assert talk.text("response.output_audio_transcript.delta") == expected.text
    heard = np.frombuffer(talk.audio(), "<i2").astype(float) / 32767
    assert heard.shape == (expected.tensors["audio"].shape[1],) != (0,)
    assert np.abs(heard - expected.tensors["audio"][0].clip(-1, 1)).max() <= 1 / 32767


async def test_written_question_is_answered_in_speech_as_in_a_chat(served: Running) -> None:
    async with talking(url(served)) as talk:
        await prepared(talk)
        await talk.say(HELLO)
        done = await talk.answer()
        assert done["status"] in ("completed", "incomplete")
        assert_told(talk, await chat(served, [{"type": "text", "text": HELLO}]))


async def test_spoken_question_is_heard_at_24_khz_and_answered_in_speech(served: Running) -> None:
    steps = np.arange(RATE * 3 // 2) / RATE
    wire = (8000 * np.sin(2 * np.pi * 220 * steps * (1 + steps / 10))).astype("<i2")
    async with talking(url(served)) as talk:
        await prepared(talk)
        await talk.hear(wire.tobytes())
        await talk.send("input_audio_buffer.commit")
        await talk.until("conversation.item.done")
        await talk.answer()
        samples = (wire.astype(np.float32) / np.float32(32768))[None]
        payload = MultimodalPayload.of({"sample_rate": RATE}, audio=samples)
        assert_told(talk, await chat(served, [{"type": "audio", "media": "question"}], question=payload))


async def test_text_alone_leaves_the_talker_at_rest_and_voices_are_the_models(served: Running) -> None:
    async with talking(url(served)) as talk:
        await prepared(talk, output_modalities=["text"])
        await talk.say(HELLO)
        done = await talk.answer()
        assert done["output"][0]["content"][0]["text"] == talk.text("response.output_text.delta") != ""
        assert talk.audio() == b""
        spoken = await talk.answer(output_modalities=["audio"], audio={"output": {"voice": "Chelsie"}})
        assert spoken["audio"]["output"]["voice"] == "Chelsie"
        assert talk.audio() != b""
        error = await talk.error("response.create", response={"audio": {"output": {"voice": "heart"}}})
        assert "Chelsie" in error["message"]


async def test_what_the_model_cannot_do_is_refused_by_name(served: Running) -> None:
    async with talking(url(served)) as talk:
        await prepared(talk)
        error = await talk.error("session.update", session={"audio": {"input": {"transcription": {}}}})
        assert "transcription" in error["message"]


async def test_a_session_with_functions_calls_them_in_silence_and_speaks_the_answer(served: Running) -> None:
    zone = {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}
    clock = {"type": "function", "name": "clock", "parameters": zone | {"additionalProperties": False}}
    async with talking(url(served)) as talk:
        await prepared(talk, tools=[clock], parallel_tool_calls=False, max_output_tokens=400)
        await talk.say(HELLO)
        (call,) = (await talk.answer(tool_choice="required"))["output"]
        assert (call["type"], json.loads(call["arguments"]), talk.audio()) == ("function_call", {"zone": "UTC"}, b"")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
        await talk.send("conversation.item.create", item=result)
        await talk.until("conversation.item.done")
        done = await talk.answer(max_output_tokens=12)
        assert (done["output"][0]["type"], talk.audio() != b"") == ("message", True)
