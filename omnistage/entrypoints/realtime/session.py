"""One realtime session: client events in, server events out, at most one response of the conversation at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from omnistage.entrypoints.http.inputs import voice_of
from omnistage.entrypoints.http.parse import validation_error
from omnistage.entrypoints.http.state import ServerState, new_id
from omnistage.entrypoints.realtime import events
from omnistage.entrypoints.realtime.conversation import Content, Conversation, Item
from omnistage.entrypoints.realtime.events import ResponseFields, Session, merged
from omnistage.entrypoints.realtime.hearing import Hearing
from omnistage.entrypoints.realtime.items import read_item
from omnistage.entrypoints.realtime.planning import plan_response, tool_fields
from omnistage.entrypoints.realtime.refusal import Refusal
from omnistage.entrypoints.realtime.response import CancelReason, Emit, Response
from omnistage.entrypoints.realtime.transcribing import Transcription
from omnistage.errors import OmniError
from omnistage.media.samples import FloatAudio


class RealtimeSession:
    """Its tasks run in `tasks`; whoever cancels that group ends everything that the session holds."""

    def __init__(self, state: ServerState, session: Session, emit: Emit, tasks: asyncio.TaskGroup) -> None:
        self.conversation_id = new_id("conv_")
        self.session = session
        self._state, self._emit, self._tasks = state, emit, tasks
        self._conversation = Conversation()
        self._hearing = Hearing(state, session.audio.input, emit, self)
        self._running: dict[str, tuple[Response, asyncio.Task[None]]] = {}
        self._current: str | None = None
        self._last_response: str | None = None
        self._answer_waits = False

    async def begin(self) -> None:
        await self._emit("session.created", session=self.session)

    def close(self) -> None:
        """Lets go of detector, audio and pictures. No event may follow."""
        self._hearing.close()
        self._conversation.items.clear()
        self._running.clear()

    async def take(self, text: str | bytes) -> None:
        """Does what one client event says; what cannot be done becomes an error event."""
        try:
            event = events.client_events.decode(text)
            await self._attempt(self._dispatch(event), event.event_id)
        except msgspec.ValidationError as error:
            info = validation_error(error).info
            await self._error("invalid_value", info.message, info.param, events.event_id_of(text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            await self._error("invalid_json", "the event is not valid JSON", None, None)

    async def _attempt(self, action: Coroutine[Any, Any, None], event_id: str | None) -> None:
        try:
            await action
        except Refusal as refusal:
            await self._error(refusal.code, refusal.message, refusal.param, event_id)
        except OmniError as error:
            await self._error(error.info.code.value, error.info.message, error.info.param, event_id)
        except msgspec.ValidationError as error:
            info = validation_error(error).info
            await self._error("invalid_value", info.message, info.param, event_id)

    async def _error(self, code: str, message: str, param: str | None, event_id: str | None) -> None:
        kind = "invalid_request_error"
        error = {"type": kind, "code": code, "message": message[:600], "param": param, "event_id": event_id}
        await self._emit("error", error=error)

    async def _dispatch(self, event: events.AnyClientEvent) -> None:
        match event:
            case events.AudioAppend(audio=audio):
                await self._hearing.append(audio)
            case events.AudioCommit():
                await self._hearing.commit()
            case events.AudioClear():
                await self._hearing.clear()
            case events.SessionUpdate(session=changes):
                await self._update(changes)
            case events.ResponseCreate(response=fields):
                await self._create(fields or ResponseFields())
            case events.ResponseCancel(response_id=response_id):
                await self._cancel(response_id)
            case events.OutputClear():
                await self._clear_output()
            case events.ItemCreate(item=fields, previous_item_id=previous):
                await self._create_item(fields, previous)
            case events.ItemRetrieve() | events.ItemTruncate() | events.ItemDelete():
                await self._touch_item(event)

    async def _update(self, changes: dict[str, Any]) -> None:
        changed = merged(self.session, changes)
        if changed.id != self.session.id:
            raise Refusal("invalid_value", "session.id cannot change", "session.id")
        self._state.check_model(changed.model)
        check_session(self._state, changed)
        self._hearing.configure(changed.audio.input)
        self.session = changed
        await self._emit("session.updated", session=changed)

    # Turns: what the hearing side reports.

    async def interrupted(self) -> None:
        self._answer_waits = False
        if self._current is not None:
            await self._stop(self._current, "turn_detected")

    async def heard(self, item_id: str, samples: FloatAudio, rate: int) -> None:
        item = Item(id=item_id, role="user", content=[Content(type="input_audio", audio=samples, rate=rate)])
        previous = self._conversation.insert(item)
        await self._emit("input_audio_buffer.committed", item_id=item_id, previous_item_id=previous)
        await self._announce(item, previous)
        settings = self.session.audio.input.transcription
        if settings is not None:
            transcription = Transcription(self._state.engine, self._emit, item_id, item.content[0])
            self._tasks.create_task(transcription.run(settings))

    async def answer(self) -> None:
        """Answers now, or once the response that is being given is over."""
        if self._current is not None:
            self._answer_waits = True
            return
        await self._create(ResponseFields())

    # Items.

    async def _announce(self, item: Item, previous: str | None) -> None:
        await self._emit("conversation.item.added", previous_item_id=previous, item=item.fields())
        await self._emit("conversation.item.done", previous_item_id=previous, item=item.fields())
        gone = self._conversation.overflow(self._state.limits.max_audio_s)
        if gone and self.session.truncation == "disabled":
            message = f"the conversation holds more than {self._state.limits.max_audio_s} s of audio; delete items"
            raise Refusal("conversation_full", message)
        for item_id in gone:
            self._conversation.remove(item_id)
            await self._emit("conversation.item.deleted", item_id=item_id)

    async def _create_item(self, fields: events.AnyItem, after: str | None) -> None:
        item = await read_item(self._state, self.session.audio.input.format.type, fields)
        previous = self._conversation.insert(item, after)
        await self._announce(item, previous)

    async def _touch_item(self, event: events.ItemRetrieve | events.ItemTruncate | events.ItemDelete) -> None:
        item = self._conversation.find(event.item_id)
        match event:
            case events.ItemRetrieve():
                await self._emit("conversation.item.retrieved", item=item.fields(self._hearing.format))
            case events.ItemTruncate(content_index=index, audio_end_ms=end_ms):
                item.truncate(end_ms)
                place = {"item_id": item.id, "content_index": index}
                await self._emit("conversation.item.truncated", audio_end_ms=end_ms, **place)
            case events.ItemDelete():
                if item.status == "in_progress":
                    raise Refusal("invalid_value", "the item is being written; cancel its response first", "item_id")
                self._conversation.remove(item.id)
                await self._emit("conversation.item.deleted", item_id=item.id)

    # Responses.

    async def _create(self, fields: ResponseFields) -> None:
        joins = fields.conversation == "auto"
        if joins and self._current is not None:
            message = f"the conversation has the active response {self._current}; cancel it or wait for response.done"
            raise Refusal("conversation_already_has_active_response", message)
        items = self._conversation.items if fields.input is None else [await self._given(i) for i in fields.input]
        plan = plan_response(self._state, self.session, fields, items)
        plan.conversation_id = self.conversation_id if joins else None
        response = Response(plan, self._emit, self._conversation.append)
        if joins:
            self._current = response.id
        self._last_response = response.id
        await response.begin()
        task = self._tasks.create_task(self._run(response))
        self._running[response.id] = (response, task)

    async def _given(self, entry: events.AnyItem | events.ItemReference) -> Item:
        if isinstance(entry, events.ItemReference):
            return self._conversation.find(entry.id)
        return await read_item(self._state, self.session.audio.input.format.type, entry)

    async def _run(self, response: Response) -> None:
        with self._state.exchange(response.id) as engine:
            await response.run(engine)
        self._forget(response.id)
        if self._answer_waits and self._current is None:
            self._answer_waits = False
            await self._attempt(self._create(ResponseFields()), None)

    def _forget(self, response_id: str) -> None:
        self._running.pop(response_id, None)
        if self._current == response_id:
            self._current = None

    async def _cancel(self, response_id: str | None) -> None:
        wanted = response_id or self._current
        if wanted is None or wanted not in self._running:
            raise Refusal("response_cancel_not_active", "no such response is active", "response_id")
        await self._stop(wanted, "client_cancelled")

    async def _stop(self, response_id: str, reason: CancelReason) -> None:
        """When this returns, the response has sent its last event."""
        response, task = self._running[response_id]
        if response.closing:
            await asyncio.wait({task})
            return
        task.cancel()
        await asyncio.wait({task})
        self._forget(response_id)
        await response.cancelled(reason)

    async def _clear_output(self) -> None:
        if self._last_response is None:
            raise Refusal("invalid_value", "there is no output audio to clear")
        if self._current is not None:
            await self._stop(self._current, "client_cancelled")
        await self._emit("output_audio_buffer.cleared", response_id=self._last_response)


def check_session(state: ServerState, session: Session) -> None:
    """Raises RequestError or Refusal naming the setting that this model cannot honour."""
    offered = state.capabilities.output_modalities
    for modality in session.output_modalities:
        if modality not in offered:
            message = f"session.output_modalities: {modality!r} is not offered (offered: {', '.join(offered)})"
            raise Refusal("invalid_value", message, "session.output_modalities")
    voice_of(state, session.audio.output.voice, "session.audio.output.voice")
    if session.tools:
        tool_fields(session, ResponseFields())
    if session.audio.input.transcription is not None and "transcription" not in state.capabilities.tasks:
        message = "session.audio.input.transcription: this model does not transcribe; set it to null"
        raise Refusal("invalid_value", message, "session.audio.input.transcription")
