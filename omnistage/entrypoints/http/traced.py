"""The server as one exchange sees it: what its engine requests and its media work take goes on their timelines."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from omnistage.engine.client import EngineClient
from omnistage.engine.timeline import Front
from omnistage.entrypoints.http.owner import EngineView
from omnistage.media.isolate import Decoder
from omnistage.media.jobs import DecodeJob
from omnistage.media.pool import MediaPool
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, OmniRequestOutput

T = TypeVar("T")


class TracedEngine(EngineView):
    """Makes every request one of an exchange."""

    def __init__(self, engine: EngineClient, front: Front) -> None:
        super().__init__(engine)
        self._front = front

    def generate(
        self, request: OmniRequest, media: dict[str, MultimodalPayload] | None = None
    ) -> AsyncIterator[OmniRequestOutput]:
        """See `EngineClient.generate`."""
        self.timelines.claim(request.id, self._front)
        return self._engine.generate(request, media)


class TracedPool(MediaPool):
    """Runs in another pool, which it owns no thread of, and takes the time."""

    def __init__(self, pool: MediaPool, front: Front) -> None:
        self._pool = pool
        self._front = front

    async def run(self, function: Callable[..., T], *args: object) -> T:
        start_s = time.monotonic()
        try:
            return await self._pool.run(function, *args)
        finally:
            self._front.media(start_s, time.monotonic())

    def close(self) -> None:
        self._pool.close()


class TracedDecoder:
    """A `Decoder` that takes the time of another."""

    def __init__(self, decoder: Decoder, front: Front) -> None:
        self._decoder = decoder
        self._front = front

    async def decode(self, job: DecodeJob, data: bytes) -> MultimodalPayload:
        start_s = time.monotonic()
        try:
            return await self._decoder.decode(job, data)
        finally:
            self._front.media(start_s, time.monotonic())

    def close(self) -> None:
        self._decoder.close()
