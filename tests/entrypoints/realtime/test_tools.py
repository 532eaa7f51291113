"""Functions in a realtime session: calls are items of the response, results become items of the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omnistage.request import FinishReason, OmniRequest, OmniRequestOutput
from tests.entrypoints.http.conftest import Running, Start
from tests.entrypoints.http.fake_engine import FakeEngine, Media, audio_event, last_event, speech_of, text_event
from tests.entrypoints.realtime.talk import Talk, talking

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}


async def calling(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
    """Thinks, says something aloud, and calls twice; answers in words once it has a result."""
    if (request.messages or [])[-1]["role"] == "tool":
        yield text_event(request, "Sunny.", 0)
    else:
        yield text_event(request, "hm", 0, {"reasoning": True})
        yield text_event(request, "Let me see.", 1, {"tool_calls": [{"index": 0, "name": "weather", "arguments": "{"}]})
        yield audio_event(request, speech_of(1), 0)
        yield text_event(request, "", 2, {"tool_calls": [{"index": 0, "arguments": "}"}]})
        yield text_event(request, "", 3, {"tool_calls": [{"index": 1, "name": "weather", "arguments": "{ }"}]})
    yield last_event(request, tokens=3)


async def only_calling(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
    yield text_event(request, "", 0, {"tool_calls": [{"index": 0, "name": "weather", "arguments": "{}"}]})
    yield last_event(request, tokens=3)


@pytest.fixture
async def server(start: Start) -> Running:
    return await start(FakeEngine(calling))


async def test_calls_are_items_of_the_response_and_their_results_are_answered(server: Running) -> None:
    async with talking(server.url) as talk:
        await talk.send("session.update", session={"tools": [TOOL], "tool_choice": "auto"})
        assert (await talk.until("session.updated"))["session"]["tools"] == [TOOL]
        await talk.say("What is the weather in Rome?")
        done = await talk.answer()
        message, first, second = done["output"]
        assert message["content"][0]["transcript"] == "Let me see."
        assert (first["type"], first["name"], first["arguments"]) == ("function_call", "weather", "{}")
        assert (second["arguments"], second["status"]) == ("{ }", "completed")
        assert first["call_id"] != second["call_id"]
        pieces = [e for e in talk.log if e["type"] == "response.function_call_arguments.delta"]
        assert [(e["item_id"], e["output_index"], e["delta"]) for e in pieces] == [
            (first["id"], 1, "{"), (first["id"], 1, "}"), (second["id"], 2, "{ }"),
        ]  # fmt: skip
        ends = [e for e in talk.log if e["type"] == "response.function_call_arguments.done"]
        assert [(e["call_id"], e["name"], e["arguments"]) for e in ends] == [
            (item["call_id"], "weather", item["arguments"]) for item in (first, second)
        ]
        for made in (first, second):
            result = {"type": "function_call_output", "call_id": made["call_id"], "output": "22 degrees"}
            await talk.send("conversation.item.create", item=result)
            assert (await talk.until("conversation.item.done"))["item"]["output"] == "22 degrees"
        answer = await talk.answer(output_modalities=["text"])
        assert answer["output"][0]["content"][0]["text"] == "Sunny."
    asked, again = server.engine.requests
    function = {name: TOOL[name] for name in ("name", "description", "parameters")}
    assert asked.tools == [{"type": "function", "function": function}]
    user, assistant, *results = again.messages or []
    assert (user["role"], assistant["content"]) == ("user", "Let me see.")
    assert [call["id"] for call in assistant["tool_calls"]] == [first["call_id"], second["call_id"]]
    assert [(r["role"], r["tool_call_id"], r["content"]) for r in results] == [
        ("tool", made["call_id"], "22 degrees") for made in (first, second)
    ]


async def test_answer_that_only_calls_has_no_message(start: Start) -> None:
    server = await start(FakeEngine(only_calling))
    async with talking(server.url) as talk:
        await talk.say("Go")
        done = await talk.answer(tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
        assert [item["type"] for item in done["output"]] == ["function_call"]
        assert talk.audio() == b""
    choice: Any = server.engine.requests[0].tool_choice
    assert choice == {"type": "function", "function": {"name": "weather"}}


async def test_calls_of_earlier_sessions_can_be_told(server: Running) -> None:
    async with talking(server.url) as talk:
        await talk.say("Weather?")
        call = {"type": "function_call", "name": "weather", "arguments": "{}", "call_id": "c1"}
        await talk.send("conversation.item.create", item=call)
        assert (await talk.until("conversation.item.done"))["item"]["call_id"] == "c1"
        result = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
        await talk.send("conversation.item.create", item=result)
        await talk.until("conversation.item.done")
        await talk.answer(output_modalities=["text"])
    _, assistant, tool = server.engine.requests[0].messages or []
    assert (assistant["content"], assistant["tool_calls"][0]["function"]["name"]) == ("", "weather")
    assert (tool["tool_call_id"], tool["content"]) == ("c1", "rain")


async def cut_call(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
    """One whole call, and one that the token limit cuts or, asked for "Slowly", a cancel; answers "Yes." later."""
    messages = request.messages or []
    if len(messages) > 1:
        yield text_event(request, "Yes.", 0)
    else:
        yield text_event(request, "", 0, {"tool_calls": [{"index": 0, "name": "weather", "arguments": "{}"}]})
        yield text_event(request, "", 1, {"tool_calls": [{"index": 1, "name": "weather", "arguments": '{"ci'}]})
        if messages[0]["content"][0]["text"] == "Slowly":
            await asyncio.sleep(60)
    yield last_event(request, FinishReason.STOP if len(messages) > 1 else FinishReason.LENGTH, tokens=3)


async def until_second_call(talk: Talk, cancel: bool) -> dict[str, Any]:
    await talk.send("response.create")
    while (await talk.until("response.function_call_arguments.delta"))["delta"] != '{"ci':
        pass
    if cancel:
        await talk.send("response.cancel")
    done: dict[str, Any] = (await talk.until("response.done"))["response"]
    return done


@pytest.mark.parametrize(("text", "status"), [("Go", "incomplete"), ("Slowly", "cancelled")])
async def test_call_that_was_cut_does_not_fail_every_later_response(start: Start, text: str, status: str) -> None:
    server = await start(FakeEngine(cut_call))
    async with talking(server.url) as talk:
        await talk.send("session.update", session={"tools": [TOOL], "output_modalities": ["text"]})
        await talk.until("session.updated")
        await talk.say(text)
        done = await until_second_call(talk, status == "cancelled")
        assert (done["status"], [item["status"] for item in done["output"]]) == (status, ["completed", "incomplete"])
        for made in done["output"]:
            result = {"type": "function_call_output", "call_id": made["call_id"], "output": "22"}
            await talk.send("conversation.item.create", item=result)
            await talk.until("conversation.item.done")
        assert (await talk.answer())["output"][0]["content"][0]["text"] == "Yes."
    _, assistant, *results = server.engine.requests[1].messages or []
    assert [call["id"] for call in assistant["tool_calls"]] == [done["output"][0]["call_id"]]
    assert [result["tool_call_id"] for result in results] == [done["output"][0]["call_id"]]


async def test_whole_call_can_be_made_while_the_response_goes_on(start: Start) -> None:
    server = await start(FakeEngine(cut_call))
    async with talking(server.url) as talk:
        await talk.say("Slowly")
        await talk.send("response.create", response={"tools": [TOOL]})
        made = await talk.until("response.function_call_arguments.done")
        assert (await talk.until("response.output_item.done"))["item"]["status"] == "completed"
        result = {"type": "function_call_output", "call_id": made["call_id"], "output": "22"}
        await talk.send("conversation.item.create", item=result)
        while (await talk.until("conversation.item.done"))["item"].get("output") != "22":
            pass
        await talk.send("response.cancel")
        await talk.until("response.done")
        done = [event for event in talk.log if event["type"] == "response.function_call_arguments.done"]
        assert [event["arguments"] for event in done] == ["{}", '{"ci']


async def test_call_without_call_id_gets_one_and_one_without_json_is_refused(server: Running) -> None:
    async with talking(server.url) as talk:
        call = {"type": "function_call", "name": "weather", "arguments": ""}
        await talk.send("conversation.item.create", item=call)
        assert (await talk.until("conversation.item.done"))["item"]["call_id"].startswith("call_")
        for arguments in ("no JSON", "[1]", '{"city": "Ro'):
            error = await talk.error("conversation.item.create", item={**call, "arguments": arguments})
            assert error["param"] == "item.arguments"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL | {"parameters": {"type": "array"}}]}, "tools[0].function.parameters"),
    ],
)
async def test_tools_that_fail_every_response_are_refused_with_the_session(
    server: Running, changes: dict[str, Any], param: str
) -> None:
    async with talking(server.url) as talk:
        assert (await talk.error("session.update", session=changes))["param"] == param
        await talk.say("still here")
