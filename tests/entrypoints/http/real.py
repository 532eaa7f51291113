"""A real engine behind the HTTP front in this process, with clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai

from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.http.access import KeyRing
from omnistage.entrypoints.http.app import create_app
from omnistage.entrypoints.http.server import HttpServer, listen


class Running:
    """`http` and `client` (the official one) speak to `engine`."""

    def __init__(self, engine: AsyncOmniEngine, address: str) -> None:
        self.engine = engine
        self.http = httpx.AsyncClient(base_url=address, timeout=60, trust_env=False)
        inner = httpx.AsyncClient(timeout=60, trust_env=False)
        self.client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0, http_client=inner)


@asynccontextmanager
async def serving_engine(engine: AsyncOmniEngine, keys: KeyRing | None = None) -> AsyncIterator[Running]:
    """Serves a started engine on a port of the system's choice."""
    server = HttpServer(create_app(engine, keys=keys), listen("127.0.0.1", 0))
    await server.start()
    running = Running(engine, f"http://127.0.0.1:{server.address[1]}")
    try:
        yield running
    finally:
        await running.http.aclose()
        await running.client.close()
        await server.close()
