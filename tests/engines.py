"""Helpers shared by tests that run a whole engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.omni import OmniResult, ResultBuilder
from omnistage.request import OmniRequest
from omnistage.testing.leakcheck import settled


@asynccontextmanager
async def running(model: str, overrides: dict[str, Any] | None = None) -> AsyncIterator[AsyncOmniEngine]:
    """An engine for the block, which must be at rest with its books in order when the block ends."""
    async with AsyncOmniEngine(resolve_config(model, None, overrides or {})) as engine:
        yield engine
        await settled(engine)


async def answer(engine: AsyncOmniEngine, **fields: Any) -> OmniResult:
    """The whole answer to one request."""
    request = OmniRequest(**fields)
    builder = ResultBuilder(request.id)
    async for output in engine.generate(request):
        builder.add(output)
    return builder.result()
