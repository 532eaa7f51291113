"""The WebSocket of a realtime session: handshake, receiving, sending, and the supervisor boundary of a session."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from omnistage.entrypoints.http.asgi import JSON, Receive, Scope, Send
from omnistage.entrypoints.http.errors import error_body
from omnistage.entrypoints.http.state import ServerState, new_id
from omnistage.entrypoints.http.trace_context import trace_headers
from omnistage.entrypoints.realtime.events import AudioInput, ServerVad, Session, SessionAudio
from omnistage.entrypoints.realtime.session import RealtimeSession
from omnistage.errors import HTTP_STATUS, ErrorCode, ErrorInfo, OmniError, RequestError

logger = logging.getLogger("omnistage.realtime")
PATHS = ("/v1/realtime", "/v1/duplex")
SUBPROTOCOL = "realtime"
INTERNAL_ERROR = 1011

Admit = Callable[[Scope], ServerState]


class _ClientLeft(Exception):
    """The socket is closed: everything of the session ends."""


def _trim() -> None:
    """Gives freed memory back: glibc keeps what many sessions at once have left scattered in its arenas."""
    with contextlib.suppress(AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


class RealtimeServer:
    """All realtime sockets of one app; at most `limit` at once."""

    def __init__(self, limit: int, *, keyed: bool) -> None:
        self.live = 0
        self._limit = limit
        self._keyed = keyed

    async def serve(self, scope: Scope, receive: Receive, send: Send, admit: Admit) -> int:
        """Runs one socket to its end; returns the HTTP status that the handshake got."""
        await receive()
        try:
            state, session = self._open(scope, admit)
        except OmniError as error:
            return await _refuse(scope, send, error.info)
        offered = scope.get("subprotocols", ())
        await send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL if SUBPROTOCOL in offered else None})
        self.live += 1
        try:
            await _supervise(state, session, receive, send)
        except asyncio.CancelledError:
            logger.info("realtime session %s was cut: the server stops", session.id)
        finally:
            self.live -= 1
        if not self.live:
            with contextlib.suppress(asyncio.CancelledError):  # the server stops: its memory goes anyway
                await state.run(_trim)
        return 101

    def _open(self, scope: Scope, admit: Admit) -> tuple[ServerState, Session]:
        """Raises RequestError or OmniError when there is to be no session."""
        state = admit(scope).within(trace_headers(scope))
        if scope["path"] not in PATHS:
            raise RequestError("there is no such socket", code=ErrorCode.NOT_FOUND)
        if not self._keyed:
            _check_origin(scope)
        if self.live >= self._limit:
            raise OmniError(f"{self._limit} realtime sessions are open", code=ErrorCode.OVERLOADED, retry_after_s=1.0)
        return state, _session(state, scope)


def _check_origin(scope: Scope) -> None:
    """Without keys, a page of another site must not use the visitor's access to this server."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    origin = headers.get(b"origin")
    if origin is not None and urlsplit(origin.decode("latin-1")).netloc != headers.get(b"host", b"").decode("latin-1"):
        raise RequestError("pages of other sites need a server with API keys", code=ErrorCode.FORBIDDEN)


def _session(state: ServerState, scope: Scope) -> Session:
    """The settings that a session starts with."""
    query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
    duplex = query.pop("duplex", "0")
    state.check_model(query.pop("model", None))
    if query or duplex not in ("0", "1"):
        name = next(iter(query), "duplex")
        raise RequestError(f"{name}: unknown query parameter or value; known: model, duplex=0|1", param=name)
    state.check_task("chat")
    speaks = "audio" in state.capabilities.output_modalities
    interrupts = duplex == "0" and scope["path"] != "/v1/duplex"
    return Session(
        id=new_id("sess_"),
        model=state.model,
        output_modalities=["audio" if speaks else "text"],
        audio=SessionAudio(input=AudioInput(turn_detection=ServerVad(interrupt_response=interrupts))),
    )


async def _refuse(scope: Scope, send: Send, info: ErrorInfo) -> int:
    """An HTTP answer in place of the handshake."""
    status = HTTP_STATUS[info.code]
    body = error_body(info)
    headers = [(b"content-type", JSON), (b"content-length", str(len(body)).encode())]
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body, "more_body": False})
    return status


class _Outbox:
    """Numbers and sends server events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._prefix = new_id("event_")
        self._count = 0

    async def emit(self, kind: str, /, **fields: Any) -> None:
        self._count += 1
        event = {"type": kind, "event_id": f"{self._prefix}_{self._count}", **fields}
        try:
            await self._send({"type": "websocket.send", "text": msgspec.json.encode(event).decode()})
        except OSError:
            raise _ClientLeft from None


async def _supervise(state: ServerState, settings: Session, receive: Receive, send: Send) -> None:
    """The supervisor boundary: whatever a session raises ends this socket only, as an error without details."""
    outbox = _Outbox(send)
    try:
        async with asyncio.TaskGroup() as tasks:
            await _converse(RealtimeSession(state, settings, outbox.emit, tasks), receive)
    except* _ClientLeft:
        logger.debug("realtime session %s: the client left", settings.id)
    except* Exception:
        logger.exception("realtime session %s failed", settings.id)
        await outbox.emit(
            "error", error={"type": "server_error", "code": "internal_error", "message": "internal error"}
        )
        await send({"type": "websocket.close", "code": INTERNAL_ERROR})


async def _converse(session: RealtimeSession, receive: Receive) -> None:
    """Raises _ClientLeft at the end of the socket. The session lets go of its megabytes then: its cycles are small
    objects, of which the garbage collector thinks little."""
    try:
        await session.begin()
        await _listen(session, receive)
    finally:
        session.close()


async def _listen(session: RealtimeSession, receive: Receive) -> None:
    """Raises _ClientLeft at the end of the socket."""
    while (message := await receive())["type"] != "websocket.disconnect":
        text = message.get("text")
        await session.take(message.get("bytes") or b"" if text is None else text)
    raise _ClientLeft
