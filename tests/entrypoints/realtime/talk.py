"""A realtime client for tests: every server event must be one of the official package's types."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

from openai.types.realtime import RealtimeServerEvent
from pydantic import BaseModel
from websockets.asyncio.client import ClientConnection, connect

# Each member of the official union by the event type that it stands for.
_EVENTS: dict[str, type[BaseModel]] = {
    get_args(member.model_fields["type"].annotation)[0]: member for member in get_args(get_args(RealtimeServerEvent)[0])
}
TIMEOUT_S = 60.0


class Talk:
    """One socket. `log` holds every event that came, in order."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.log: list[dict[str, Any]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def next(self) -> dict[str, Any]:
        raw = await asyncio.wait_for(self.socket.recv(), TIMEOUT_S)
        event: dict[str, Any] = json.loads(raw)
        _EVENTS[event["type"]].model_validate(event)
        self.log.append(event)
        return event

    async def until(self, kind: str) -> dict[str, Any]:
        """The next event of that type; an error event that was not asked for fails the test."""
        while (event := await self.next())["type"] != kind:
            assert event["type"] != "error", event
        return event

    async def error(self, kind: str, **fields: Any) -> dict[str, Any]:
        """What an event is refused with."""
        await self.send(kind, event_id="mine", **fields)
        error: dict[str, Any] = (await self.next())["error"]
        assert error["event_id"] == "mine"
        return error

    async def say(self, text: str, **more: Any) -> dict[str, Any]:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **more}
        await self.send("conversation.item.create", item=item)
        return await self.until("conversation.item.done")

    async def answer(self, **response: Any) -> dict[str, Any]:
        """Asks for a response; returns it when it is done."""
        await self.send("response.create", response=response)
        done: dict[str, Any] = (await self.until("response.done"))["response"]
        return done

    async def hear(self, data: bytes, piece: int = 4800) -> None:
        """Sends audio in pieces of so many bytes."""
        for start in range(0, len(data), piece):
            await self.send("input_audio_buffer.append", audio=base64.b64encode(data[start : start + piece]).decode())

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.log]

    def text(self, kind: str) -> str:
        return "".join(event["delta"] for event in self.log if event["type"] == kind)

    def audio(self, response_id: str | None = None) -> bytes:
        """The bytes of all output audio, or of one response."""
        return b"".join(
            base64.b64decode(event["delta"])
            for event in self.log
            if event["type"] == "response.output_audio.delta" and response_id in (None, event["response_id"])
        )


@asynccontextmanager
async def talking(url: str, path: str = "/v1/realtime", **options: Any) -> AsyncIterator[Talk]:
    """A session on the server at `url` (http://...); the first event has been read."""
    # A client that stops reading waits for its own close in vain: frames are read whether they are asked for or not.
    async with connect(url.replace("http", "ws", 1) + path, max_queue=None, **options) as socket:
        talk = Talk(socket)
        assert (await talk.next())["type"] == "session.created"
        yield talk
