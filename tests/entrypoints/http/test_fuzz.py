"""Any JSON in any field: the answer is good, or a 4xx that names the field; never a 5xx, never a hang."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import MutableMapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.entrypoints.http import schema
from omnistage.entrypoints.http.app import HttpApp, create_app
from tests.entrypoints.http.fake_engine import FakeEngine
from tests.fuzzing import examples, repeatable

MESSAGES = [{"role": "user", "content": "Hi"}]
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (schema.ChatRequest, {"messages": MESSAGES}),
    "/v1/completions": (schema.CompletionRequest, {"prompt": "Hi"}),
    "/v1/audio/speech": (schema.SpeechRequest, {"input": "Hi"}),
}
FIELDS = [(path, field.name) for path, (kind, _) in BASES.items() for field in msgspec.structs.fields(kind)]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**70), max_value=2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(["", "auto", "text", "audio", "wav", "heart", "user", "../../x", "\x00", "a" * 5000]),
)
names = st.sampled_from(["role", "type", "content", "id", "format", "voice", "name", "thinker", "12", "temperature"])
any_json = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(names | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_audio", "image_url", "audio_url", "video_url", "refusal", "file"])},
    optional={
        "text": any_json,
        "input_audio": st.fixed_dictionaries({"data": scalars, "format": scalars}) | any_json,
        "image_url": st.fixed_dictionaries({"url": scalars | st.just("data:image/png;base64,QUJD")}) | any_json,
        "video_url": st.fixed_dictionaries({"url": st.just("data:video/mp4;base64,AAAAHGZ0eXBpc29t")}) | any_json,
        "audio_url": st.fixed_dictionaries({"url": st.just("data:audio/wav;base64,UklGRgAAAABXQVZF")}) | any_json,
    },
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool"])},
        optional={"content": any_json | st.lists(parts, max_size=3), "name": any_json, "audio": any_json},
    ),
    max_size=3,
)


async def post(app: HttpApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Calls the application without a socket; the client stays connected until the answer is there."""
    sent: list[MutableMapping[str, Any]] = []
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        return await asyncio.get_running_loop().create_future()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-type", b"application/json")]}
    async with asyncio.timeout(5):
        await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@functools.cache
def shared_app() -> HttpApp:
    return create_app(FakeEngine())


def answer_to(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    return asyncio.run(post(shared_app(), path, json.dumps(body).encode()))


def check(path: str, field: str, value: Any) -> int:
    status, text = answer_to(path, {**BASES[path][1], field: value})
    if status == 200:
        return status
    assert 400 <= status < 500, text
    error = json.loads(text)["error"]
    assert error["param"] == field or error["param"].startswith((f"{field}.", f"{field}[")), error
    assert "0x" not in error["message"].replace(str(value), "")
    return status


@settings(max_examples=examples(12), deadline=None, derandomize=repeatable())
@pytest.mark.parametrize(("path", "field"), FIELDS)
@given(value=any_json)
def test_any_json_in_any_field(path: str, field: str, value: Any) -> None:
    check(path, field, value)


@settings(max_examples=examples(150), deadline=None, derandomize=repeatable())
@given(value=messages)
def test_any_messages(value: list[Any]) -> None:
    check("/v1/chat/completions", "messages", value)


def bounds(path: str) -> list[tuple[str, float]]:
    """One value beyond each bound of each numeric field."""
    kind = BASES[path][0]
    _, components = msgspec.json.schema_components([kind])
    beyond = list[tuple[str, float]]()
    for name, node in components[kind.__name__]["properties"].items():
        for option in node.get("anyOf", [node]):
            if "minimum" in option:
                beyond.append((name, option["minimum"] - 1))
            if "maximum" in option:
                beyond.append((name, option["maximum"] + 1))
            if "exclusiveMinimum" in option:
                beyond.append((name, option["exclusiveMinimum"]))
    return beyond


@pytest.mark.parametrize(("path", "field", "value"), [(path, *row) for path in BASES for row in bounds(path)])
def test_number_beyond_its_bound_is_refused(path: str, field: str, value: float) -> None:
    assert check(path, field, value) == 400


@pytest.mark.parametrize("path", sorted(BASES))
def test_unknown_field_is_refused_by_name(path: str) -> None:
    for field in ("tools", "functions", "best-of", "Temperature", "n ", "__proto__"):
        status, text = answer_to(path, {**BASES[path][1], field: 1})
        assert status == 400
        assert json.loads(text)["error"]["param"] == field


@pytest.mark.parametrize(
    "label", ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"]
)
@pytest.mark.parametrize("path", sorted(BASES))
def test_labels_are_accepted(path: str, label: str) -> None:
    value: Any = {"metadata": {"a": "b"}, "store": True}.get(label, "x")
    assert answer_to(path, {**BASES[path][1], label: value})[0] == 200


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("modalities", ["image"], "modalities"),
        ("audio", {"format": "wav"}, "audio"),
        ("sampling", {"nobody": {}}, "sampling.nobody"),
        ("sampling", {"thinker": {"temperature": 9}}, "sampling.thinker"),
        ("sampling", {"thinker": {"heat": 1}}, "sampling.thinker"),
        ("top_logprobs", 3, "top_logprobs"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("logit_bias", {"1": 101}, "logit_bias[...]"),
        ("stop", ["ok", ""], "stop[1]"),
        ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
        ("messages", [{"role": "user", "content": [{"type": "file"}]}], "messages[0].content[0].type"),
        ("messages", [{"role": "user", "content": "x", "weight": 1}], "messages[0].weight"),
        ("messages", [{"role": "assistant"}], "messages[0].content"),
        ("messages", [{"role": "user", "content": "x" * ((1 << 18) + 1)}], "messages[0].content"),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
            "messages[0].content[0].image_url.url",
        ),
        (
            "messages",
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}]}],
            "messages[0].content[0].input_audio.data",
        ),
    ],
)
def test_field_at_fault_is_named_exactly(field: str, value: Any, param: str) -> None:
    status, text = answer_to("/v1/chat/completions", {**BASES["/v1/chat/completions"][1], field: value})
    assert 400 <= status < 500
    assert json.loads(text)["error"]["param"] == param


def test_differing_token_limits_are_refused() -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}
    assert answer_to("/v1/chat/completions", body)[0] == 400
    body["max_tokens"] = 4
    assert answer_to("/v1/chat/completions", body)[0] == 200
