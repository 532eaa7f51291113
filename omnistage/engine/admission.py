"""Bounded admission: a request is let in while the predicted work ahead of it fits its class's share of a bound.

The bound is `limits.max_wait_s`, in predicted seconds of the busiest of the stages that the request visits. Requests
that are sent away hear when there will be room, which is then kept for them (`bookings`). Those that are in run up to
`limits.max_running` at a time, by priority, then in order of arrival; unless it is urgent, none is let in that would
make one of lower priority wait much longer than the bound.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from omnistage.config.model import LimitsConfig
from omnistage.engine.bookings import Booking, Bookings
from omnistage.engine.work import Ask, Load, WorkModel
from omnistage.errors import ErrorCode, RequestError
from omnistage.request import StageMetrics

# The part of the bound that requests of priority > 0, 0 and < 0 may fill.
SHARES = (1.0, 0.75, 0.5)
# What is held back of a share for those that come back when they were told to.
KEPT_SHARE = 0.15
# Newcomers pass those who have booked while less than this part of the share is filled: some never come back.
IDLE_SHARE = 0.5
# By when those that are in are to run although others come before them, in multiples of the bound.
PATIENCE = 1.5
SHORTEST_WAIT_S = 0.05
_RATE_WEIGHT = 0.01


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that is in: what it asks, since when, and by when it is to run (the loop's clock)."""

    ask: Ask
    priority: int
    order: int
    latest: float
    running: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        return (-self.priority, self.order)


class Pace:
    """Predicted seconds of work that are done in a second, while there is plenty to do: below 1 because stages also
    wait for each other and for messages."""

    def __init__(self) -> None:
        self._work = self._elapsed = 1.0
        self._since: float | None = None

    @property
    def rate(self) -> float:
        return self._work / self._elapsed

    def note(self, work_s: float, now: float, *, busy: bool) -> None:
        """`work_s` was done since the last call; it counts if the engine was busy all the while."""
        if self._since is not None and busy:
            elapsed = now - self._since
            keep = 1 - _RATE_WEIGHT
            self._work = keep * self._work + work_s
            self._elapsed = keep * self._elapsed + elapsed
        self._since = now if busy else None


class Admission:
    """Who is in, who waits, who was sent away until when.

    `clock` gives seconds, `progress` the seconds that each stage has worked already on those that are in.
    """

    def __init__(
        self,
        limits: LimitsConfig,
        model: WorkModel,
        clock: Callable[[], float],
        progress: Callable[[], Mapping[str, float]],
    ) -> None:
        self._progress = progress
        self._limits = limits
        self._model = model
        self._clock = clock
        self._tickets: set[Ticket] = set()
        self._load = Load()
        self.running = 0
        self._waiters: list[tuple[tuple[int, int], Ticket, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._pace = Pace()
        self.bookings = Bookings()

    @property
    def waiting(self) -> int:
        return len(self._tickets) - self.running

    def backlog_s(self) -> float:
        """Predicted seconds until all that is in is done."""
        return max(self._left().values()) / self._pace.rate

    def _left(self) -> dict[str, float]:
        """Predicted seconds until each stage has done all that is in."""
        done = self._progress()
        return {stage: max(0.0, s - done.get(stage, 0.0)) for stage, s in self._model.per_stage(self._load).items()}

    async def enter(self, ask: Ask, priority: int, key: Callable[[], bytes]) -> Ticket:
        """Takes a slot, waiting for one if need be. `key` gives what the request asks, as bytes.

        Raises RequestError(OVERLOADED) with the seconds after which there is room for it.
        """
        now = self._clock()
        booking = self.bookings.due(key(), now) if len(self.bookings) else None
        wait_s = self._refused_for(ask, priority, booking, now)
        if wait_s is not None:
            self._book(ask, priority, key(), booking, wait_s)
        if booking is not None:
            self.bookings.take(booking)
        ticket = Ticket(ask, priority, next(self._order), now + PATIENCE * self._limits.max_wait_s)
        self._tickets.add(ticket)
        self._load.add(ask)
        if self.running < self._limits.max_running and not self._waiters:
            self.running += 1
            ticket.running = True
            return ticket
        await self._slot(ticket)
        return ticket

    def _book(self, ask: Ask, priority: int, key: bytes, booking: Booking | None, wait_s: float) -> None:
        """Sends a request away. Raises RequestError."""
        now = self._clock()
        if booking is not None:
            self.bookings.move(booking, now, wait_s)
        else:
            self.bookings.expect(key, ask, priority, now, wait_s)
        text = f"{self.running} requests run and {self.waiting} wait: {self.backlog_s():.1f} s of work"
        raise RequestError(text, code=ErrorCode.OVERLOADED, retry_after_s=wait_s)

    def _refused_for(self, ask: Ask, priority: int, booking: Booking | None, now: float) -> float | None:
        """None for a request that is let in, else the seconds after which there will be room."""
        share = self._limits.max_wait_s * SHARES[0 if priority > 0 else 1 if priority == 0 else 2]
        planned = share * (1 - KEPT_SHARE)
        inside = self._busiest_of(ask, self._left())
        place = self.waiting < self._limits.max_queue and self._keeps_promises(ask, priority, now)
        before = self.bookings.before_new(priority) if booking is None else self.bookings.before(booking)
        expected = self.bookings.taken_share * sum(self._wait_s(ask, load) for load in before)
        fits = inside + expected <= (planned if booking is None else share)
        if place and (fits or inside <= IDLE_SHARE * planned):
            return None
        crowd = 0.0 if place else self._until_a_place(inside + expected, sum(len(load) for load in before))
        return max(SHORTEST_WAIT_S, inside + expected - planned, crowd)

    def _until_a_place(self, work_s: float, booked: int) -> float:
        """Seconds until one of those that are in has left: `work_s` is what they and the `booked` ones have to do."""
        each = work_s / max(1, len(self._tickets) + booked)
        return each * (1 + self.bookings.taken_share * booked)

    def _wait_s(self, ask: Ask, load: Load) -> float:
        """Seconds until the busiest of the request's stages has done a load."""
        return self._busiest_of(ask, self._model.per_stage(load))

    def _busiest_of(self, ask: Ask, per_stage: Mapping[str, float]) -> float:
        return max((per_stage[stage] for stage in ask.stages), default=0.0) / self._pace.rate

    def _keeps_promises(self, ask: Ask, priority: int, now: float) -> bool:
        """False when someone of lower priority would run too late for it. Urgent requests (> 0) need not ask."""
        if priority > 0:
            return True
        lower = {ticket for ticket in self._tickets if ticket.priority < priority}
        if not lower:
            return True
        ahead = Load()
        ahead.add(ask)
        for ticket in sorted(self._tickets, key=lambda each: each.rank):
            if ticket in lower and now + self._wait_s(ticket.ask, ahead) > ticket.latest:
                return False
            ahead.add(ticket.ask)
        return True

    async def _slot(self, ticket: Ticket) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (ticket.rank, ticket, future))
        try:
            await future
        except asyncio.CancelledError:
            self.leave(ticket, {})
            raise

    def leave(self, ticket: Ticket, costs: Mapping[str, StageMetrics]) -> None:
        """A request is over; `costs` are those of an answered one, empty for any other. The next one runs at once."""
        busiest, backlog = self._busiest()
        busy = backlog / self._pace.rate >= self._limits.max_wait_s * SHARES[-1] * IDLE_SHARE
        self._pace.note(self._model.done(busiest, costs), self._clock(), busy=busy)
        if costs:
            self._model.learn(ticket.ask, costs)
        self._tickets.discard(ticket)
        self._load.remove(ticket.ask)
        if not ticket.running:
            self._waiters = [entry for entry in self._waiters if entry[1] is not ticket]
            heapq.heapify(self._waiters)
            return
        self.running -= 1
        while self._waiters and self.running < self._limits.max_running:
            _, following, future = heapq.heappop(self._waiters)
            if not future.done():
                following.running = True
                self.running += 1
                future.set_result(None)

    def _busiest(self) -> tuple[str, float]:
        """The stage with most to do, and its predicted seconds."""
        return max(self._left().items(), key=lambda item: item[1])
