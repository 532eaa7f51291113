"""Places kept for refused requests that were told when to come back.

A booking is found again by what the request asks, so that clients need no ticket. Those that nobody takes up lapse; the
share that is taken up says how much room the rest is worth.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass

from omnistage.engine.work import Ask, Load

MAX_BOOKED = 8192
# How late a client may come: `Retry-After` counts whole seconds, and clients add a little chance of their own.
GRACE_S = 2.0
GRACE_SHARE = 0.25
# A client that comes this much earlier than it was told (share of the time) is not sent away again.
EARLY_SHARE = 0.1
_RATE_WEIGHT = 0.02


@dataclass(slots=True)
class Booking:
    """Times on the loop's clock."""

    key: bytes
    ask: Ask
    due: float
    opens: float
    lapses: float
    live: bool = True
    overdue: bool = False


class Bookings:
    """At most `MAX_BOOKED`; a request beyond that is told a time all the same.

    `load` is all that is booked, `overdue` the part whose time has come.
    """

    def __init__(self) -> None:
        self.load = Load()
        self.overdue = Load()
        self._coming: list[tuple[float, int, Booking]] = []
        self.taken_share = 1.0
        self._by_key: dict[bytes, deque[Booking]] = {}
        self._lapsing: list[tuple[float, int, Booking]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self.load)

    def expect(self, key: bytes, ask: Ask, now: float, wait_s: float) -> None:
        """Keeps a place for a request that was told to come back in `wait_s`."""
        if len(self) >= MAX_BOOKED:
            return
        booking = Booking(
            key, ask, now + wait_s, now + (1 - EARLY_SHARE) * wait_s, now + wait_s + max(GRACE_S, GRACE_SHARE * wait_s)
        )
        self.load.add(ask)
        self._by_key.setdefault(key, deque()).append(booking)
        order = next(self._order)
        heapq.heappush(self._lapsing, (booking.lapses, order, booking))
        heapq.heappush(self._coming, (booking.due, order, booking))

    def due(self, key: bytes, now: float) -> Booking | None:
        """The place of such a request, if it is time to take it."""
        self._lapse(now)
        waiting = self._by_key.get(key)
        return waiting[0] if waiting and waiting[0].opens <= now else None

    def take(self, booking: Booking) -> None:
        """The request has come and is in."""
        self._end(booking, taken=1.0)

    def move(self, booking: Booking, now: float, wait_s: float) -> None:
        """The request has come in time and was sent away again: its place is a later one."""
        self._end(booking, taken=1.0)
        self.expect(booking.key, booking.ask, now, wait_s)

    def _lapse(self, now: float) -> None:
        while self._coming and (self._coming[0][0] <= now or not self._coming[0][2].live):
            booking = heapq.heappop(self._coming)[2]
            if booking.live:
                booking.overdue = True
                self.overdue.add(booking.ask)
        while self._lapsing and (self._lapsing[0][0] < now or not self._lapsing[0][2].live):
            booking = heapq.heappop(self._lapsing)[2]
            if booking.live:
                self._end(booking, taken=0.0)

    def _end(self, booking: Booking, taken: float) -> None:
        booking.live = False
        self.taken_share += _RATE_WEIGHT * (taken - self.taken_share)
        self.load.remove(booking.ask)
        if booking.overdue:
            self.overdue.remove(booking.ask)
        waiting = self._by_key[booking.key]
        waiting.remove(booking)
        if not waiting:
            del self._by_key[booking.key]
