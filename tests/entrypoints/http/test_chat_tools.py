"""Tool calls, thoughts and shapes in chat completions, over a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from omnistage.request import FinishReason, OmniRequest, OmniRequestOutput
from tests.entrypoints.http.conftest import Running, Start
from tests.entrypoints.http.fake_engine import FakeEngine, Media, last_event, text_event

HELLO: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


async def calling(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
    """Thinks, says something, and makes two calls."""
    yield text_event(request, "hm", 0, {"reasoning": True})
    yield text_event(request, "Let me see.", 1, {"tool_calls": [{"index": 0, "name": "f", "arguments": "{"}]})
    yield text_event(request, "", 2, {"tool_calls": [{"index": 0, "arguments": "}"}]})
    yield text_event(request, "", 3, {"tool_calls": [{"index": 1, "name": "g", "arguments": "[1]"}]})
    yield last_event(request, FinishReason.STOP)


async def test_streamed_calls_and_thoughts_are_those_of_the_whole_answer(start: Start) -> None:
    server = await start(FakeEngine(calling))
    ask: dict[str, Any] = {"model": "fake-model", "messages": HELLO, "tools": TOOLS}
    choice = (await server.client.chat.completions.create(**ask)).choices[0]
    message: Any = choice.message
    assert (message.content, message.reasoning_content, message.reasoning) == ("Let me see.", "hm", "hm")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("f", "{}"), ("g", "[1]")]
    assert choice.finish_reason == "tool_calls"
    ids, names, arguments, last = {}, {}, {0: "", 1: ""}, None
    async for chunk in await server.client.chat.completions.create(stream=True, **ask):
        last = chunk.choices[0].finish_reason
        for call in chunk.choices[0].delta.tool_calls or []:
            arguments[call.index] += call.function.arguments
            if call.id:
                ids[call.index], names[call.index] = call.id, call.function.name
                assert call.type == "function"
    assert (names, arguments, last) == ({0: "f", 1: "g"}, {0: "{}", 1: "[1]"}, "tool_calls")
    assert len(set(ids.values())) == 2
    assert all(call.startswith("call_") for call in ids.values())


async def test_tools_and_earlier_calls_reach_the_engine(server: Running) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "done"}]})
    await server.client.chat.completions.create(
        model="fake-model", messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    request = server.engine.requests[0]
    assert (request.tools, request.tool_choice, request.parallel_tool_calls) == (TOOLS, "required", False)
    assert request.messages is not None
    assert request.messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "a"},
    ]


SHAPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"response_format": {"type": "json_object"}}, {"json_object": True, "param": "response_format"}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}}},
        {"json": {}, "strict": True, "param": "response_format"},
    ),
    ({"guided_regex": "a+"}, {"regex": "a+", "param": "guided_regex"}),
    ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"], "param": "structured_outputs"}),
]


@pytest.mark.parametrize(("fields", "shape"), SHAPES)
async def test_every_way_to_demand_a_shape_reaches_the_sampler(
    server: Running, fields: dict[str, Any], shape: dict[str, Any]
) -> None:
    answer = await server.http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert answer.status_code == 200, answer.text
    assert server.engine.requests[0].sampling[""]["structured_outputs"] == shape


async def test_two_shapes_at_once_are_refused(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await server.client.chat.completions.create(
            model="fake-model",
            messages=HELLO,
            response_format={"type": "json_object"},
            extra_body={"guided_regex": "a"},
        )
    assert caught.value.param == "response_format"
