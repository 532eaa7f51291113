"""Bounded admission: so many requests run, so many wait, the rest hear when to come back."""

from __future__ import annotations

import asyncio
import heapq
import itertools

from omnistage.config.model import LimitsConfig
from omnistage.errors import ErrorCode, RequestError

RATE_WEIGHT = 0.2
FIRST_GUESS_S = 1.0


class Admission:
    """Slots for running requests. Waiters are served by priority (higher first), then in order of arrival."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._running = 0
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._interval_s: float | None = None
        self._last_end: float | None = None

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return sum(not future.done() for _, _, future in self._waiters)

    def retry_after_s(self) -> float:
        """When a slot of the queue should be free: the measured seconds between completions, at least a tenth."""
        return max(0.1, self._interval_s if self._interval_s is not None else FIRST_GUESS_S)

    async def enter(self, priority: int) -> None:
        """Takes a slot, waiting for one if the queue has room. Raises RequestError(OVERLOADED) if it has none."""
        if self._running < self._limits.max_running and not self.waiting:
            self._running += 1
            return
        if self.waiting >= self._limits.max_queue:
            raise RequestError(
                f"{self._running} requests run and {self.waiting} wait (limits.max_queue)",
                code=ErrorCode.OVERLOADED,
                retry_after_s=self.retry_after_s(),
            )
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (-priority, next(self._order), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Gives a slot back; the next waiter has it at once."""
        now = asyncio.get_running_loop().time()
        if self._last_end is not None:
            gap = now - self._last_end
            last = self._interval_s if self._interval_s is not None else gap
            self._interval_s = last + RATE_WEIGHT * (gap - last)
        self._last_end = now
        while self._waiters:
            _, _, future = heapq.heappop(self._waiters)
            if not future.done():
                future.set_result(None)
                return
        self._running -= 1
