"""The embedded pipeline through `omnistage serve`: the official client, audio formats, shapes, tools, killed stages."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import numpy as np
import pydantic
import pytest
from openai import BadRequestError, OpenAI

from tests.models.smol_speech.sentences import word_errors, words
from tests.servers import Server

pytestmark = pytest.mark.slow

MAGIC = {"mp3": (b"\xff", b"ID3"), "opus": (b"OggS",), "aac": (b"\xff\xf1",), "flac": (b"fLaC",), "wav": (b"RIFF",)}
SENTENCE = "The train to London leaves from platform nine."
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_completion_tokens": 40, "seed": 5}


@pytest.fixture(scope="module")
def client(smol_speech: Server) -> OpenAI:
    return OpenAI(base_url=smol_speech.address + "/v1", api_key="none", timeout=120, max_retries=0)


def seconds_of(data: bytes, kind: str) -> float:
    if kind == "pcm":
        return len(data) / 2 / 24000
    with av.open(io.BytesIO(data)) as file:
        stream = file.streams.audio[0]
        return sum(frame.samples / frame.sample_rate for frame in file.decode(stream))


@pytest.mark.parametrize("kind", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
def test_speech_in_every_format_has_its_magic_bytes_and_length(client: OpenAI, kind: str) -> None:
    answer = client.audio.speech.create(
        model="smol-speech", voice="heart", input=SENTENCE, response_format=kind, extra_body={"seed": 1}
    )
    data = answer.read()
    assert data.startswith(MAGIC.get(kind, (b"",)))
    pcm = client.audio.speech.create(
        model="smol-speech", voice="heart", input=SENTENCE, response_format="pcm", extra_body={"seed": 1}
    )
    assert abs(seconds_of(data, kind) - seconds_of(pcm.read(), "pcm")) < 0.15


def test_spoken_words_come_back_as_text(client: OpenAI) -> None:
    spoken = client.audio.speech.create(model="smol-speech", voice="joe", input=SENTENCE, response_format="wav")
    heard = client.audio.transcriptions.create(model="smol-speech", file=("speech.wav", spoken.read()))
    assert word_errors(words(SENTENCE), words(heard.text)) <= 1


def test_chat_answers_in_text_and_in_text_with_audio(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = client.chat.completions.create(model="smol-speech", messages=messages, **GREEDY)
    assert "Paris" in text.choices[0].message.content
    assert text.choices[0].finish_reason == "stop"
    assert text.usage.prompt_tokens > 5
    spoken = client.chat.completions.create(
        model="smol-speech",
        messages=messages,
        modalities=["text", "audio"],
        audio={"voice": "heart", "format": "wav"},
        **GREEDY,
    )
    audio = spoken.choices[0].message.audio
    assert "Paris" in audio.transcript
    assert seconds_of(base64.b64decode(audio.data), "wav") > 0.8


def test_streamed_audio_is_the_whole_audio_and_starts_before_the_text_ends(client: OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "smol-speech",
        "messages": [{"role": "user", "content": "How do plants make food?"}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "heart", "format": "pcm16"},
    } | GREEDY
    kinds, pieces, transcript = list[str](), list[bytes](), ""
    for chunk in client.chat.completions.create(stream=True, **ask):
        delta = chunk.choices[0].delta.model_dump() if chunk.choices else {}
        audio = delta.get("audio") or {}
        if audio.get("data"):
            kinds.append("audio")
            pieces.append(base64.b64decode(audio["data"]))
        if audio.get("transcript"):
            kinds.append("text")
            transcript += audio["transcript"]
    whole = client.chat.completions.create(**ask).choices[0].message.audio
    assert transcript == whole.transcript
    streamed = np.frombuffer(b"".join(pieces), "<i2").astype(int)
    expected = np.frombuffer(base64.b64decode(whole.data), "<i2").astype(int)
    assert streamed.shape == expected.shape
    assert np.abs(streamed - expected).max() <= 1
    assert kinds.index("audio") < len(kinds) - 1 - kinds[::-1].index("text")


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)
    children: list[str] = pydantic.Field(max_length=2)


def test_parsed_answer_is_of_the_demanded_class(client: OpenAI) -> None:
    said: Any = [{"role": "user", "content": "Invent a person. Answer in JSON."}]
    made = client.chat.completions.parse(
        model="smol-speech", messages=said, response_format=Person, temperature=0.7, max_completion_tokens=120, seed=3
    )
    assert isinstance(made.choices[0].message.parsed, Person)
    assert made.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"(?s)\{.*\}"),
        ({"extra_body": {"guided_choice": ["yes", "no"]}}, "yes|no"),
        ({"extra_body": {"structured_outputs": {"regex": "[A-Z]{3}-[0-9]{2}"}}}, "[A-Z]{3}-[0-9]{2}"),
    ],
)
def test_other_shapes_hold_and_stream_as_they_are_whole(client: OpenAI, extra: dict[str, Any], pattern: str) -> None:
    ask: dict[str, Any] = {"model": "smol-speech", "messages": [{"role": "user", "content": "Answer shortly."}]}
    ask |= {"temperature": 0.0, "max_completion_tokens": 60, **extra}
    whole = client.chat.completions.create(**ask).choices[0]
    if whole.finish_reason == "stop":
        assert re.fullmatch(pattern, whole.message.content)
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **ask)]
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content


def test_bad_shapes_and_tools_are_refused_with_their_field(client: OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "objekt"}}}
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}]
    asks: list[tuple[dict[str, Any], str]] = [
        ({"response_format": schema}, "response_format"),
        ({"extra_body": {"guided_regex": "a("}}, "guided_regex"),
        ({"tools": bad, "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ]
    for fields, param in asks:
        with pytest.raises(BadRequestError) as caught:
            client.chat.completions.create(model="smol-speech", messages=[{"role": "user", "content": "Hi"}], **fields)
        assert caught.value.param == param


def test_tool_calls_are_streamed_and_their_results_are_read(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    ask: dict[str, Any] = {"model": "smol-speech", "tools": TOOLS, "tool_choice": NAMED, "temperature": 0.0}
    made = client.chat.completions.create(messages=messages, **ask).choices[0]
    call = made.message.tool_calls[0]
    assert (made.finish_reason, made.message.content, call.function.name) == ("tool_calls", None, "weather")
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    with client.chat.completions.stream(messages=messages, **ask) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    messages += [streamed.message, {"role": "tool", "tool_call_id": call.id, "content": "18 C, sunny"}]
    said = client.chat.completions.create(
        model="smol-speech", messages=messages, tools=TOOLS, tool_choice="none", temperature=0.0, max_tokens=30
    )
    assert said.choices[0].message.content
    assert said.choices[0].message.tool_calls is None


@pytest.mark.parametrize("stage", ["listener", "talker", "code2wav", "thinker"])
def test_killed_stage_comes_back_and_requests_elsewhere_are_right(
    smol_speech: Server, client: OpenAI, stage: str
) -> None:
    def text(number: int) -> str:
        content = f"Name {number} fruits."
        answer = client.chat.completions.create(
            model="smol-speech", messages=[{"role": "user", "content": content}], **GREEDY
        )
        return str(answer.choices[0].message.content)

    expected = [text(number) for number in (2, 3)]
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(text, number) for number in (2, 3)]
        time.sleep(0.3)
        os.kill(smol_speech.stage_pid(stage), signal.SIGKILL)
        smol_speech.until(False, 5)  # the promise is a second; the cores are shared
        assert [answer.result() for answer in answers] == expected
    smol_speech.until(True, 60)
    assert text(2) == expected[0]
