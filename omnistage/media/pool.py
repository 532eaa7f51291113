"""A small thread pool that keeps media work off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class MediaPool:
    """Runs codec calls in `workers` threads. A codec object serves one call at a time: await each before the next."""

    def __init__(self, workers: int = 2) -> None:
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="omnistage-media")

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """`function(*args)` in a thread; what it raises is raised here."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def close(self) -> None:
        """Drops queued work and lets running calls end."""
        self._executor.shutdown(wait=False, cancel_futures=True)
