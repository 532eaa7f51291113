"""Static pages: the playground at /, the documentation at /docs, and the OpenAPI document."""

from __future__ import annotations

import importlib.resources

from omnistage.entrypoints.http.asgi import JSON, Exchange, Header
from omnistage.entrypoints.http.state import ServerState

_HTML = b"text/html; charset=utf-8"
# The pages load nothing from elsewhere: inline script and style, requests to this server only.
_POLICY: tuple[Header, ...] = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
        b"media-src 'self' blob:; img-src 'self' data:; base-uri 'none'; form-action 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
)


def read_page(name: str) -> bytes:
    """A page that ships with the package."""
    return importlib.resources.files("omnistage.entrypoints.http").joinpath("static", name).read_bytes()


async def index(state: ServerState, exchange: Exchange) -> None:
    """The playground: chat, speech, latency."""
    await exchange.answer(200, _HTML, state.pages["index.html"], _POLICY)


async def docs(state: ServerState, exchange: Exchange) -> None:
    """The routes and their fields, as a page."""
    await exchange.answer(200, _HTML, state.pages["docs.html"], _POLICY)


async def openapi(state: ServerState, exchange: Exchange) -> None:
    """This document."""
    await exchange.answer(200, JSON, state.pages["openapi.json"])
