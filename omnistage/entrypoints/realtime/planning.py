"""A response's settings over the session's -> the engine request."""

from __future__ import annotations

from typing import Any

import msgspec

from omnistage.entrypoints.http.inputs import voice_of
from omnistage.entrypoints.http.state import ServerState, new_id
from omnistage.entrypoints.realtime.conversation import Item, engine_messages
from omnistage.entrypoints.realtime.events import NamedTool, ResponseFields, Session
from omnistage.entrypoints.realtime.refusal import Refusal
from omnistage.entrypoints.realtime.response import ResponsePlan
from omnistage.request import OmniRequest
from omnistage.tools import tool_use


def plan_response(state: ServerState, session: Session, fields: ResponseFields, items: list[Item]) -> ResponsePlan:
    """Raises Refusal or RequestError when the response cannot be given as asked; `items` are what it answers."""
    modality = _modality(state, session, fields)
    instructions = session.instructions if fields.instructions is None else fields.instructions
    messages, media = engine_messages(instructions, items, state.limits.max_input_chars)
    if not messages:
        raise Refusal("invalid_value", "there is nothing to answer: neither items nor instructions")
    asked = fields.audio.output
    voice = voice_of(state, asked.voice or session.audio.output.voice, "response.audio.output.voice")
    limit = fields.max_output_tokens or session.max_output_tokens
    sampling: dict[str, Any] = {} if limit == "inf" else {"": {"max_tokens": limit}}
    speed = session.audio.output.speed
    speaks = modality == "audio"
    request = OmniRequest(
        id=new_id("resp_"),
        task="chat",
        messages=messages,
        modalities=_engine_modalities(state, modality),
        voice=voice if speaks else None,
        sampling=sampling,
        params={"speed": speed} if speaks and speed != 1.0 else {},
        **tool_fields(session, fields),
    )
    return ResponsePlan(
        request=request,
        media=media,
        speaks=speaks,
        format=(asked.format or session.audio.output.format).type,
        voice=voice,
        max_output_tokens=limit,
        conversation_id=None,
        metadata=fields.metadata,
        text_stages=state.capabilities.text_stages,
        sample_rate=state.sample_rate,
    )


def _modality(state: ServerState, session: Session, fields: ResponseFields) -> str:
    modality = (fields.output_modalities or session.output_modalities)[0]
    if modality not in state.capabilities.output_modalities:
        message = f"response.output_modalities: {modality!r} is not offered by this model"
        raise Refusal("invalid_value", message, "response.output_modalities")
    return modality


def tool_fields(session: Session, fields: ResponseFields) -> dict[str, Any]:
    """The tools of the request as chat completions write them. Raises RequestError naming the field."""
    tools = session.tools if fields.tools is None else fields.tools
    choice = session.tool_choice if fields.tool_choice is None else fields.tool_choice
    parallel = session.parallel_tool_calls if fields.parallel_tool_calls is None else fields.parallel_tool_calls
    shown = [{"type": tool.type, "function": msgspec.to_builtins(tool, str_keys=True)} for tool in tools]
    for tool in shown:
        tool["function"].pop("type")
    named = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice
    tool_use(shown, named, parallel=parallel)
    return {"tools": shown, "tool_choice": named, "parallel_tool_calls": parallel}


def _engine_modalities(state: ServerState, modality: str) -> tuple[str, ...]:
    """Speech brings its text: it is the transcript."""
    offered = state.capabilities.output_modalities
    return tuple(name for name in ("text", "audio") if name in offered and name in ("text", modality))
