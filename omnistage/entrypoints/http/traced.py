"""The media work of a server as one exchange sees it: what it takes goes on the timelines of its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from omnistage.engine.timeline import Front
from omnistage.media.isolate import Decoder
from omnistage.media.jobs import DecodeJob
from omnistage.media.pool import MediaPool
from omnistage.payload import MultimodalPayload

T = TypeVar("T")


class TracedPool(MediaPool):
    """Runs in another pool, which it owns no thread of, and takes the time."""

    def __init__(self, pool: MediaPool, front: Front) -> None:
        self._pool = pool
        self._front = front

    async def run(self, function: Callable[..., T], *args: object) -> T:
        with self._front.media():
            return await self._pool.run(function, *args)

    def close(self) -> None:
        self._pool.close()


class TracedDecoder:
    """A `Decoder` that takes the time of another."""

    def __init__(self, decoder: Decoder, front: Front) -> None:
        self._decoder = decoder
        self._front = front

    async def decode(self, job: DecodeJob, data: bytes) -> MultimodalPayload:
        with self._front.media():
            return await self._decoder.decode(job, data)

    def close(self) -> None:
        self._decoder.close()
