"""Places kept for refused requests that were told when to come back.

A booking is found again by what the request asks, so that clients need no ticket. The share of bookings that is taken
up says how much room the rest is worth; it is counted when they lapse, so that early and late ones count alike.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections import deque
from dataclasses import dataclass, replace

from omnistage.engine.work import Ask, Load

MAX_BOOKED = 8192
# How late a client may come: `Retry-After` counts whole seconds, and clients add a little chance of their own.
GRACE_S = 2.0
# A client that comes this much earlier than it was told (share of the time) is not sent away again.
EARLY_SHARE = 0.1
# The share taken up is 1 after so many bookings of which nothing is known, and forgets by this factor per booking.
_TRUSTED = 5.0
_FORGET = 0.995


@dataclass(slots=True, eq=False)
class Booking:
    """Times on the loop's clock. `first_due` is what the client was told first: who was told earlier comes first."""

    key: bytes
    ask: Ask
    priority: int
    first_due: float
    due: float
    opens: float
    lapses: float
    taken: bool = False
    overdue: bool = False


class Bookings:
    """At most `MAX_BOOKED`; a request beyond that is told a time all the same."""

    def __init__(self) -> None:
        self._loads: dict[int, Load] = {}
        self._by_key: dict[bytes, deque[Booking]] = {}
        self._coming: list[tuple[float, int, Booking]] = []
        self._lapsing: list[tuple[float, int, Booking]] = []
        self._overdue: list[Booking] = []
        self._order = itertools.count()
        self._taken = self._lapsed = _TRUSTED

    def __len__(self) -> int:
        return sum(len(load) for load in self._loads.values())

    @property
    def taken_share(self) -> float:
        """The part of the bookings that clients come back for, of late."""
        return self._taken / self._lapsed

    def expect(self, key: bytes, ask: Ask, priority: int, now: float, wait_s: float) -> None:
        """Keeps a place for a request that was told to come back in `wait_s`."""
        due = now + wait_s
        if len(self) < MAX_BOOKED:
            self._keep(Booking(key, ask, priority, due, due, due - EARLY_SHARE * wait_s, due + GRACE_S))

    def _keep(self, booking: Booking) -> None:
        self._loads.setdefault(booking.priority, Load()).add(booking.ask)
        self._by_key.setdefault(booking.key, deque()).append(booking)
        order = next(self._order)
        heapq.heappush(self._coming, (booking.first_due, order, booking))
        heapq.heappush(self._lapsing, (booking.lapses, order, booking))

    def due(self, key: bytes, now: float) -> Booking | None:
        """The place of such a request, if it is time to take it."""
        self._pass_time(now)
        waiting = self._by_key.get(key)
        return waiting[0] if waiting and waiting[0].opens <= now else None

    def before_new(self, priority: int) -> list[Load]:
        """What those ask who come before a newcomer of that priority."""
        return [load for level, load in self._loads.items() if level >= priority]

    def before(self, booking: Booking) -> list[Load]:
        """What those ask whose time has come and who were told an earlier one."""
        load = Load()
        for other in self._overdue:
            if other.first_due >= booking.first_due:
                break
            if other.priority >= booking.priority:
                load.add(other.ask)
        return [load]

    def take(self, booking: Booking) -> None:
        """The request has come and is in."""
        booking.taken = True
        self._remove(booking)

    def move(self, booking: Booking, now: float, wait_s: float) -> None:
        """The request has come in time and was sent away again: its place is a later one."""
        self.take(booking)
        due = now + wait_s
        self._keep(replace(booking, due=due, opens=now, lapses=due + GRACE_S, taken=False, overdue=False))

    def _pass_time(self, now: float) -> None:
        while self._coming and self._coming[0][0] <= now:
            booking = heapq.heappop(self._coming)[2]
            if not booking.taken:
                booking.overdue = True
                insort(self._overdue, booking, key=lambda each: each.first_due)
        while self._lapsing and self._lapsing[0][0] < now:
            booking = heapq.heappop(self._lapsing)[2]
            self._taken = _FORGET * self._taken + booking.taken
            self._lapsed = _FORGET * self._lapsed + 1
            if not booking.taken:
                self._remove(booking)

    def _remove(self, booking: Booking) -> None:
        self._loads[booking.priority].remove(booking.ask)
        if booking.overdue:
            self._overdue.remove(booking)
        waiting = self._by_key[booking.key]
        waiting.remove(booking)
        if not waiting:
            del self._by_key[booking.key]
