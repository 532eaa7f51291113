"""The ASGI application: routing, body limits, the supervisor boundary."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from omnistage.config.model import LimitsConfig
from omnistage.engine.client import EngineClient
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
from omnistage.entrypoints.http.routes import ROUTES, Route, RouteTable
from omnistage.entrypoints.http.state import HttpOptions, ServerState, new_id
from omnistage.errors import HTTP_STATUS, ErrorCode, ErrorInfo, OmniError

logger = logging.getLogger("omnistage.http")
LINGER_S = 2.0
FAREWELL_S = 1.0


class HttpApp:
    """An ASGI application over a running engine. Call `close()` when it serves no more."""

    def __init__(self, state: ServerState, routes: tuple[Route, ...] = ROUTES) -> None:
        self.state = state
        self._table = RouteTable(routes)
        state.pages = {name: read_page(name) for name in ("index.html", "docs.html")}
        state.pages["openapi.json"] = openapi_document(routes, state.version)

    async def close(self) -> None:
        """Stops video jobs and ends the media threads."""
        await self.state.videos.close()
        self.state.pool.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            exchange = Exchange(scope, receive, send, new_id("req_"), self.state.date())
            await self._http(exchange)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _http(self, exchange: Exchange) -> None:
        found = self._table.find(exchange.path)
        if found is None:
            await send_error(exchange, ErrorInfo(ErrorCode.NOT_FOUND, "there is no such route"))
            return
        methods, exchange.path_tail = found
        route = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if route is None:
            await self._wrong_method(exchange, sorted(methods))
            return
        self.state.metrics.started()
        try:
            await self._supervise(exchange, route)
        finally:
            self.state.budget.give_back(exchange.held)
            self.state.metrics.finished(route.path, 0 if exchange.disconnected else exchange.status)

    async def _wrong_method(self, exchange: Exchange, allowed: list[str]) -> None:
        info = ErrorInfo(ErrorCode.INVALID_REQUEST, f"this route takes {', '.join(allowed)}")
        headers = ((b"allow", ", ".join(allowed).encode()),)
        await exchange.answer(405, JSON, error_body(info, 405), headers)

    async def _supervise(self, exchange: Exchange, route: Route) -> None:
        """The supervisor boundary: whatever a handler raises ends this request only, as an error without details."""
        try:
            await self._handle(exchange, route)
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

    async def _handle(self, exchange: Exchange, route: Route) -> None:
        if route.method != "POST":
            await route.handler(self.state, exchange)
            return
        state = self.state
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
        if HTTP_STATUS[info.code] >= 500:
            logger.error("%s %s: %s: %s", exchange.request_id, exchange.path, info.code.value, info.message)
        if not exchange.started:
            await self._refuse(exchange, info)
        elif exchange.trailer is not None:
            await exchange.end(b"data: " + error_body(info) + b"\n\n" + exchange.trailer)

    async def _refuse(self, exchange: Exchange, info: ErrorInfo) -> None:
        """A whole error answer. While the client still sends its body, the connection ends after the answer."""
        if exchange.method != "POST" or exchange.body_complete:
            await send_error(exchange, info)
            return
        await send_error(exchange, info, unread=True)
        await exchange.discard_body(self.state.max_body, LINGER_S)
        await exchange.end()


def create_app(engine: EngineClient, limits: LimitsConfig | None = None, options: HttpOptions | None = None) -> HttpApp:
    """The application for a running engine; `limits` default to those of the engine's configuration."""
    return HttpApp(ServerState(engine, limits or engine.config.limits, options or HttpOptions()))
