"""One HTTP request and its answer over raw ASGI: reading with limits, answering whole or piece by piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any

from omnistage.errors import ErrorCode, OmniError, RequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class ClientDisconnected(Exception):
    """The client is gone: there is nobody to answer."""


class ConnectionBroken(Exception):
    """A raw stream cannot be completed: the connection is cut, so that the client sees an incomplete answer."""


class BodyBudget:
    """Counts the bytes of all request bodies held at once; each request gives back what it took."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def take(self, count: int) -> None:
        """Raises OmniError(OVERLOADED) beyond the limit: nothing is taken then."""
        if self.held + count > self._limit:
            raise OmniError("too many request bytes in flight", code=ErrorCode.OVERLOADED, retry_after_s=1.0)
        self.held += count

    def give_back(self, count: int) -> None:
        self.held -= count


class DateHeader:
    """The Date header, formatted once per second."""

    def __init__(self) -> None:
        self._second = 0
        self._value = b""

    def __call__(self) -> bytes:
        now = int(time.time())
        if now != self._second:
            self._second, self._value = now, formatdate(now, usegmt=True).encode()
        return self._value


class Exchange:
    """A request with its answer.

    `path_tail` is what a prefix route matched; `body` is set for POST routes; `trailer` is what ends an event stream,
    None while the answer is not one. `timing` gives the Server-Timing of a whole answer.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str, date: bytes) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.request_id = request_id
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.path_tail = ""
        self.body = b""
        self.held = self.status = 0
        self.trailer: bytes | None = None
        self.timing: Callable[[], bytes] | None = None
        self.started = self.body_complete = self.disconnected = False
        self._base_headers: list[Header] = [(b"x-request-id", request_id.encode()), (b"date", date)]

    def header(self, name: bytes) -> bytes:
        """The value of a request header (lower-case name), empty when absent."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return b""

    async def read_body(self, limit: int, budget: BodyBudget, idle_timeout_s: float) -> None:
        """Reads the body into `body`, counting bytes while they arrive.

        Raises RequestError(TOO_LARGE) at byte `limit` + 1, RequestError when nothing arrives for `idle_timeout_s`,
        ClientDisconnected when the client goes.
        """
        declared = self.header(b"content-length")
        if declared.isdigit() and int(declared) > limit:
            raise _body_too_large(limit)
        parts = list[bytes]()
        try:
            async with asyncio.timeout(idle_timeout_s) as timeout:
                while (piece := await self._next_piece()) is not None:
                    self._hold(len(piece), limit, budget)
                    parts.append(piece)
                    timeout.reschedule(asyncio.get_running_loop().time() + idle_timeout_s)
        except TimeoutError:
            raise RequestError(f"the request body did not arrive within {idle_timeout_s:g} s", param="body") from None
        self.body = parts[0] if len(parts) == 1 else b"".join(parts)

    def _hold(self, count: int, limit: int, budget: BodyBudget) -> None:
        budget.take(count)
        self.held += count
        if self.held > limit:
            raise _body_too_large(limit)

    async def _next_piece(self) -> bytes | None:
        if self.body_complete:
            return None
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.disconnected = True
            raise ClientDisconnected
        self.body_complete = not message.get("more_body", False)
        return bytes(message.get("body", b""))

    async def discard_body(self, limit: int, timeout_s: float) -> None:
        """Reads and drops up to `limit` more bytes, so that a client that is still sending gets to read the answer."""
        dropped = 0
        try:
            async with asyncio.timeout(timeout_s):
                while dropped <= limit and (piece := await self._next_piece()) is not None:
                    dropped += len(piece)
        except (TimeoutError, ClientDisconnected):
            return

    @asynccontextmanager
    async def cancelled_on_disconnect(self) -> AsyncIterator[None]:
        """Cancels what runs inside when the client goes, and then raises ClientDisconnected. The body must be read."""
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._watch(task))
        try:
            yield
        except asyncio.CancelledError:
            if not self.disconnected:
                raise
            task.uncancel()
            raise ClientDisconnected from None
        finally:
            watcher.cancel()

    async def _watch(self, task: asyncio.Task[None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        task.cancel()

    async def start(self, status: int, content_type: bytes, headers: tuple[Header, ...] = ()) -> None:
        """Sends status and headers; without a content-length header the answer is chunked."""
        self.started, self.status = True, status
        all_headers = [(b"content-type", content_type), *self._base_headers, *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    async def send_events(self, data: bytes, trailer: bytes = b"") -> None:
        """Sends server-sent events, if there are any; the first call starts the stream, which ends with `trailer`."""
        if not self.started:
            self.trailer = trailer
            await self.start(200, EVENT_STREAM, ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")))
        if data:
            await self.write(data)

    async def write(self, data: bytes) -> None:
        """Sends a piece of the answer; waits while the client reads too slowly."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, content_type: bytes, body: bytes, headers: tuple[Header, ...] = ()) -> None:
        """Sends a whole answer."""
        if self.timing is not None:
            headers = (*headers, (b"server-timing", self.timing()))
        await self.start(status, content_type, (*headers, (b"content-length", str(len(body)).encode())))
        await self.end(body)


def _body_too_large(limit: int) -> RequestError:
    return RequestError(f"the request body exceeds {limit} bytes", code=ErrorCode.TOO_LARGE, param="body")
