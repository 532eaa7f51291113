from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import openai
import pytest

from omnistage.entrypoints.http.app import create_app
from omnistage.entrypoints.http.server import HttpServer, listen
from omnistage.entrypoints.http.state import HttpOptions
from tests.entrypoints.http.fake_engine import FakeEngine


class Running:
    """A server on a loopback port of the system's choice, and clients for it."""

    def __init__(self, engine: FakeEngine, server: HttpServer) -> None:
        self.engine, self.server = engine, server
        self.url = f"http://127.0.0.1:{server.address[1]}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=20, trust_env=False)
        transport = httpx.AsyncClient(timeout=20, trust_env=False)
        self.client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="unused", max_retries=0, http_client=transport
        )

    async def close(self) -> None:
        await self.http.aclose()
        await self.client.close()
        await self.server.close()


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts servers over given engines; at the end nothing of any request may be left."""
    running: list[Running] = []

    async def begin(engine: FakeEngine | None = None, options: HttpOptions | None = None) -> Running:
        chosen = engine or FakeEngine()
        server = HttpServer(create_app(chosen, options=options), listen("127.0.0.1", 0))
        await server.start()
        running.append(Running(chosen, server))
        return running[-1]

    yield begin
    for each in running:
        await each.close()
        assert not each.engine.live
        assert each.server._app.state.budget.held == 0


@pytest.fixture
async def server(start: Start) -> Running:
    return await start()
