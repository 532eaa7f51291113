"""The ASGI application: routing, body limits, the supervisor boundary."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial

import msgspec

from omnistage.engine.client import EngineClient, EngineControl
from omnistage.entrypoints.http.access import KeyRing
from omnistage.entrypoints.http.asgi import (
    JSON,
    ClientDisconnected,
    ConnectionBroken,
    Exchange,
    Receive,
    Scope,
    Send,
)
from omnistage.entrypoints.http.errors import error_body, internal_error, send_error
from omnistage.entrypoints.http.openapi import openapi_document
from omnistage.entrypoints.http.pages import read_page
from omnistage.entrypoints.http.routes import ROUTES, Route, RouteRight, RouteTable
from omnistage.entrypoints.http.state import HttpOptions, ServerState, new_id
from omnistage.entrypoints.http.timelines import server_timing
from omnistage.entrypoints.http.trace_context import trace_headers
from omnistage.entrypoints.realtime.socket import RealtimeServer
from omnistage.errors import HTTP_STATUS, ErrorCode, ErrorInfo, OmniError, RequestError

logger = logging.getLogger("omnistage.http")
LINGER_S = 2.0
FAREWELL_S = 1.0


class HttpApp:
    """An ASGI application over a running engine. Call `close()` when it serves no more.

    With `keys` everything but the routes that are open needs one; without, everything but the admin routes is open.
    """

    def __init__(self, state: ServerState, keys: KeyRing | None = None) -> None:
        self.state = state
        self._keys = keys
        self._table = RouteTable(ROUTES)
        self._realtime = RealtimeServer(state.limits.max_running, keyed=keys is not None)
        state.pages = {name: read_page(name) for name in ("index.html", "docs.html")}
        state.pages["openapi.json"] = openapi_document(ROUTES, state.version)
        self._owned = {key.digest: state.owned_by(key.salt) for key in keys.keys} if keys is not None else {}

    async def close(self) -> None:
        """Stops video jobs and ends the media threads."""
        for state in (self.state, *self._owned.values()):
            await state.videos.close()
        if self.state.decoder is not None:
            self.state.decoder.close()
        self.state.pool.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            exchange = Exchange(scope, receive, send, new_id("req_"), self.state.date())
            await self._http(exchange)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._socket(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    def admit(self, scope: Scope, right: RouteRight) -> ServerState:
        """The server as the caller may see it. Raises RequestError (401, 403) when it may not."""
        if right == "open":
            return self.state
        if self._keys is not None:
            return self._owned[self._keys.admit(scope, right).digest]
        if right == "admin":
            raise RequestError("admin routes need a server with API keys (--api-keys)", code=ErrorCode.FORBIDDEN)
        return self.state

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.state.metrics.started()
        status = 0
        try:
            status = await self._realtime.serve(scope, receive, send, lambda scope: self.admit(scope, "infer"))
        finally:
            self.state.metrics.finished("websocket", status)

    async def _http(self, exchange: Exchange) -> None:
        methods, exchange.path_tail = self._table.find(exchange.path) or ({}, "")
        route = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        try:
            state = self.admit(exchange.scope, route.scope if route is not None else "infer")
        except RequestError as error:
            await self._turn_away(exchange, error.info, route)
            return
        if not methods:
            await send_error(exchange, ErrorInfo(ErrorCode.NOT_FOUND, "there is no such route"))
        elif route is None:
            await self._wrong_method(exchange, sorted(methods))
        else:
            await self._run(exchange, route, state)

    async def _turn_away(self, exchange: Exchange, info: ErrorInfo, route: Route | None) -> None:
        self.state.metrics.started()
        try:
            await self._refuse(exchange, info)
        finally:
            self.state.metrics.finished(route.path if route is not None else "", exchange.status)

    async def _run(self, exchange: Exchange, route: Route, state: ServerState) -> None:
        self.state.metrics.started()
        front = None
        if route.method == "POST" and route.scope == "infer" and state.engine.timelines.enabled:
            front = state.engine.timelines.open(exchange.request_id, trace_headers(exchange.scope))
            state, exchange.timing = state.traced(front), partial(server_timing, front)
        try:
            await self._supervise(exchange, route, state)
        finally:
            if front is not None:
                state.engine.timelines.close(front)
            self.state.budget.give_back(exchange.held)
            self.state.metrics.finished(route.path, 0 if exchange.disconnected else exchange.status)

    async def _wrong_method(self, exchange: Exchange, allowed: list[str]) -> None:
        info = ErrorInfo(ErrorCode.INVALID_REQUEST, f"this route takes {', '.join(allowed)}")
        headers = ((b"allow", ", ".join(allowed).encode()),)
        await exchange.answer(405, JSON, error_body(info, 405), headers)

    async def _supervise(self, exchange: Exchange, route: Route, state: ServerState) -> None:
        """The supervisor boundary: whatever a handler raises ends this request only, as an error without details."""
        try:
            await self._handle(exchange, route, state)
        except ClientDisconnected:
            return
        except asyncio.CancelledError:
            await self._interrupted(exchange)
        except ConnectionBroken as error:
            logger.error("%s %s: stream cut: %s", exchange.request_id, exchange.path, error)
        except OmniError as error:
            await self._fail(exchange, error.info)
        except Exception:
            logger.exception("%s %s %s failed", exchange.request_id, exchange.method, exchange.path)
            await self._fail(exchange, internal_error())

    async def _handle(self, exchange: Exchange, route: Route, state: ServerState) -> None:
        if route.method != "POST":
            await route.handler(state, exchange)
            return
        await exchange.read_body(state.max_body, state.budget, state.options.body_idle_timeout_s)
        async with exchange.cancelled_on_disconnect():
            await route.handler(state, exchange)

    async def _interrupted(self, exchange: Exchange) -> None:
        """The owner cancelled the request: says so, unless the client is too slow to hear it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._fail(exchange, ErrorInfo(ErrorCode.UNAVAILABLE, "the server is shutting down"))

    async def _fail(self, exchange: Exchange, info: ErrorInfo) -> None:
        """Sends an error in the form that fits how far the answer is."""
        info = self._as_asked(info)
        if HTTP_STATUS[info.code] >= 500:
            logger.error("%s %s: %s: %s", exchange.request_id, exchange.path, info.code.value, info.message)
        if not exchange.started:
            await self._refuse(exchange, info)
        elif exchange.trailer is not None:
            await exchange.end(b"data: " + error_body(info) + b"\n\n" + exchange.trailer)

    def _as_asked(self, info: ErrorInfo) -> ErrorInfo:
        """A sampling field of the stage that writes the text, under the name that it has at the top of a request."""
        section, _, rest = (info.param or "").partition(".")
        stage, _, field = rest.partition(".")
        if section != "sampling" or not field or stage not in self.state.capabilities.text_stages:
            return info
        return msgspec.structs.replace(info, param=field)

    async def _refuse(self, exchange: Exchange, info: ErrorInfo) -> None:
        """A whole error answer. While the client still sends its body, the connection ends after the answer."""
        if exchange.method != "POST" or exchange.body_complete:
            await send_error(exchange, info)
            return
        await send_error(exchange, info, unread=True)
        await exchange.discard_body(self.state.max_body, LINGER_S)
        await exchange.end()


def create_app(
    engine: EngineClient,
    options: HttpOptions | None = None,
    *,
    keys: KeyRing | None = None,
    control: EngineControl | None = None,
) -> HttpApp:
    """The application for a running engine. `control` is what the admin routes command; they need `keys`."""
    state = ServerState(engine, options or HttpOptions())
    state.control = control
    return HttpApp(state, keys=keys)
