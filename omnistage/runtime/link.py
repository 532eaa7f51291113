"""The orchestrator's end of a replica's socket: frames in, one framed message out per turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import msgspec

from omnistage.messages import FrameBuffer, FromStage, ToStage, frame

_decode = msgspec.msgpack.Decoder(FromStage).decode


class Link(asyncio.Protocol):
    """`outbox` gathers what the replica is to be told; it leaves as one message at the end of this loop turn."""

    def __init__(self, on_message: Callable[[FromStage], None], on_closed: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._frames = FrameBuffer()
        self._transport: asyncio.WriteTransport | None = None
        self._outbox = ToStage()
        self._scheduled = False

    def outbox(self) -> ToStage:
        """The message being gathered; sent when the current turn of the event loop ends."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)
        return self._outbox

    def _flush(self) -> None:
        self._scheduled = False
        message, self._outbox = self._outbox, ToStage()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        for raw in self._frames.push(data):
            self._on_message(_decode(raw))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_closed()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
