"""One response of a realtime session: an engine request and the events that tell of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Literal, Protocol

import msgspec

from omnistage.engine.client import EngineClient
from omnistage.entrypoints.http.answers import DeltaToolCall
from omnistage.entrypoints.http.audio_out import base64_text, rate_of, samples_of
from omnistage.entrypoints.http.events import Media, request_events
from omnistage.entrypoints.http.result import ChoiceResult, call_deltas, usage_of
from omnistage.entrypoints.http.state import new_id
from omnistage.entrypoints.realtime.conversation import Content, Item
from omnistage.entrypoints.realtime.events import Tokens
from omnistage.entrypoints.realtime.formats import FormatName, OutputAudio, format_fields, wire_format
from omnistage.errors import HTTP_STATUS, ErrorInfo, OmniError
from omnistage.request import OmniRequest, OmniRequestOutput, is_reasoning
from omnistage.tools import MadeCall, read_arguments

ResponseStatus = Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]
CancelReason = Literal["turn_detected", "client_cancelled"]


class Emit(Protocol):
    """Sends one server event."""

    def __call__(self, kind: str, /, **fields: Any) -> Awaitable[None]: ...


class ResponsePlan(msgspec.Struct, kw_only=True):
    """What a response shall do. `conversation_id` None keeps its item out of the conversation."""

    request: OmniRequest
    media: Media
    speaks: bool
    format: FormatName
    voice: str | None
    max_output_tokens: Tokens
    conversation_id: str | None
    metadata: dict[str, str] | None
    text_stages: frozenset[str]
    sample_rate: int


class Response:
    """Run it in a task; to stop it, cancel the task while `closing` is False, wait for it, then call `cancelled`."""

    def __init__(self, plan: ResponsePlan, emit: Emit, attach: Callable[[Item], str | None]) -> None:
        self.id = plan.request.id
        self.plan = plan
        self.closing = False
        self._message: Item | None = None
        self._output = list[Item]()
        self._calls = list[Item]()
        self._emit = emit
        self._attach = attach
        self._previous: dict[str, str | None] = {}
        self._status: ResponseStatus = "in_progress"
        self._details: dict[str, Any] | None = None
        self._result = ChoiceResult(0, want_metrics=False, request_id=plan.request.id)
        self._audio = OutputAudio(wire_format(plan.format)) if plan.speaks else None

    async def run(self, engine: EngineClient) -> None:
        """Tells the whole response. An error of the engine ends it as failed."""
        try:
            async with aclosing(request_events(engine, self.plan.request, self.plan.media)) as events:
                async for output in events:
                    await self._note(output)
        except OmniError as error:
            await self._failed(error.info)
            return
        self.closing = True
        if not self._output:
            await self._open()
        if self._audio is not None:
            await self._audio_delta(self._audio.finish())
        length = self._result.finish == "length"
        self._details = {"type": "incomplete", "reason": "max_output_tokens"} if length else {"type": "completed"}
        await self._close("incomplete" if length else "completed")

    async def begin(self) -> None:
        await self._emit("response.created", response=self.fields())

    async def cancelled(self, reason: CancelReason) -> None:
        """Ends a response whose task was cancelled."""
        self.closing = True
        self._details = {"type": "cancelled", "reason": reason}
        await self._close("cancelled")

    async def _failed(self, info: ErrorInfo) -> None:
        self.closing = True
        kind = "server_error" if HTTP_STATUS[info.code] >= 500 else "invalid_request_error"
        error = {"type": kind, "code": info.code.value, "message": info.message}
        self._details = {"type": "failed", "error": error}
        await self._close("failed")

    def fields(self) -> dict[str, Any]:
        """The response resource."""
        plan = self.plan
        output = {"format": format_fields(plan.format), "voice": plan.voice}
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": self._status,
            "status_details": self._details,
            "output": [item.fields() for item in self._output],
            "conversation_id": plan.conversation_id,
            "output_modalities": ["audio" if plan.speaks else "text"],
            "audio": {"output": output},
            "max_output_tokens": plan.max_output_tokens,
            "metadata": plan.metadata,
            "usage": None if self._status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = usage_of([self._result], self.plan.text_stages, 1)
        cached = usage.prompt_tokens_details.cached_tokens
        return {
            "total_tokens": usage.total_tokens,
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "input_token_details": {"text_tokens": usage.prompt_tokens, "audio_tokens": 0, "cached_tokens": cached},
            "output_token_details": {"text_tokens": usage.completion_tokens, "audio_tokens": 0},
        }

    async def _note(self, output: OmniRequestOutput) -> None:
        self._result.note(output)
        if output.modality == "text" and output.text and not is_reasoning(output):
            await self._text_delta(output.text)
        for delta in call_deltas(self._result, output):
            await self._call_delta(delta)
        samples = samples_of(output.payload)
        if self._audio is not None and samples is not None and samples.size:
            await self._open()
            rate = self.plan.sample_rate if output.payload is None else rate_of(output.payload, self.plan.sample_rate)
            await self._audio_delta(self._audio.feed(samples, rate))

    async def _open(self) -> None:
        """Begins the message, unless it has begun."""
        if self._message is not None:
            return
        content = Content(type="output_text" if self._audio is None else "output_audio", text="")
        self._message = Item(id=new_id("item_"), role="assistant", status="in_progress", content=[content])
        await self._open_item(self._message)
        await self._part_event("response.content_part.added", part=self._part())

    async def _open_item(self, item: Item) -> None:
        self._output.append(item)
        announced = item.fields() | ({} if item.call is not None else {"content": []})
        await self._item_event("response.output_item.added", item, item=announced)
        if self.plan.conversation_id is not None:
            self._previous[item.id] = self._attach(item)
            await self._emit("conversation.item.added", previous_item_id=self._previous[item.id], item=announced)

    async def _call_delta(self, delta: DeltaToolCall) -> None:
        """A piece of a call; the first one has its id and name. A whole call ends at once, whatever follows it."""
        if isinstance(delta.id, str) and isinstance(delta.function.name, str):
            call = MadeCall(id=delta.id, name=delta.function.name)
            self._calls.append(Item(id=new_id("item_"), role="assistant", status="in_progress", call=call))
            await self._open_item(self._calls[-1])
        item = self._calls[delta.index]
        assert item.call is not None
        item.call.arguments += delta.function.arguments
        if delta.function.arguments:
            await self._call_event("delta", item, item.call, delta=delta.function.arguments)
        if item.call.arguments.endswith("}") and read_arguments(item.call.arguments) is not None:
            await self._close_item(item, "completed")

    async def _call_event(self, kind: str, item: Item, call: MadeCall, **fields: Any) -> None:
        place = {"item_id": item.id, "call_id": call.id}
        await self._item_event(f"response.function_call_arguments.{kind}", item, **place, **fields)

    async def _text_delta(self, text: str) -> None:
        await self._open()
        assert self._message is not None
        content = self._message.content[0]
        content.text = (content.text or "") + text
        kind = "output_text" if self._audio is None else "output_audio_transcript"
        await self._part_event(f"response.{kind}.delta", delta=text)

    async def _audio_delta(self, data: bytes) -> None:
        if data:
            await self._part_event("response.output_audio.delta", delta=base64_text(data))

    def _part(self) -> dict[str, Any]:
        assert self._message is not None
        text = self._message.content[0].text
        return {"type": "text", "text": text} if self._audio is None else {"type": "audio", "transcript": text}

    async def _close(self, status: ResponseStatus) -> None:
        for item in self._output:
            if item.status == "in_progress":
                await self._close_item(item, "completed" if status == "completed" else "incomplete")
        self._status = status
        await self._emit("response.done", response=self.fields())

    async def _close_item(self, item: Item, status: Literal["completed", "incomplete"]) -> None:
        if item.call is None:
            item.status = status
            await self._close_part(item.content[0])
        else:
            item.status = "incomplete" if read_arguments(item.call.arguments) is None else "completed"
            await self._call_event("done", item, item.call, name=item.call.name, arguments=item.call.arguments)
        if self.plan.conversation_id is not None:
            await self._emit("conversation.item.done", previous_item_id=self._previous[item.id], item=item.fields())
        await self._item_event("response.output_item.done", item, item=item.fields())

    async def _close_part(self, content: Content) -> None:
        if self._audio is None:
            await self._part_event("response.output_text.done", text=content.text)
        else:
            content.spoken_ms = self._audio.milliseconds
            await self._part_event("response.output_audio.done")
            await self._part_event("response.output_audio_transcript.done", transcript=content.text)
        await self._part_event("response.content_part.done", part=self._part())

    async def _item_event(self, kind: str, about: Item, /, **fields: Any) -> None:
        await self._emit(kind, response_id=self.id, output_index=self._output.index(about), **fields)

    async def _part_event(self, kind: str, **fields: Any) -> None:
        assert self._message is not None
        await self._item_event(kind, self._message, item_id=self._message.id, content_index=0, **fields)
