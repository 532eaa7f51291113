"""The orchestrator's end of a replica's socket: frames in; out, one framed message per turn of the event loop, or, for
what follows from messages that came in, as soon as those are handled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import msgspec

from omnistage.messages import FrameBuffer, FromStage, ToStage, frame

_decode = msgspec.msgpack.Decoder(FromStage).decode


class Outgoing:
    """The links that have something to send. It leaves at the end of this loop turn, or when `flush` is called."""

    def __init__(self) -> None:
        self._links: list[Link] = []

    def add(self, link: Link) -> None:
        if not self._links:
            asyncio.get_running_loop().call_soon(self.flush)
        self._links.append(link)

    def flush(self) -> None:
        links, self._links = self._links, []
        for link in links:
            link.flush()


class Link(asyncio.Protocol):
    """`outbox` gathers what the replica is to be told; it leaves as one message with what others are to be told."""

    def __init__(
        self, outgoing: Outgoing, on_message: Callable[[FromStage], None], on_closed: Callable[[], None]
    ) -> None:
        self._outgoing = outgoing
        self._on_message = on_message
        self._on_closed = on_closed
        self._frames = FrameBuffer()
        self._transport: asyncio.WriteTransport | None = None
        self._outbox = ToStage()
        self._scheduled = False

    def outbox(self) -> ToStage:
        """The message being gathered."""
        if not self._scheduled:
            self._scheduled = True
            self._outgoing.add(self)
        return self._outbox

    def flush(self) -> None:
        self._scheduled = False
        message, self._outbox = self._outbox, ToStage()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        for raw in self._frames.push(data):
            self._on_message(_decode(raw))
        # Stages first: tasks of this process that the messages woke run after this.
        self._outgoing.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_closed()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
