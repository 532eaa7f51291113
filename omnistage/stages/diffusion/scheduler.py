"""The step scheduler: which requests share the next transformer call. Pure Python over plain records.

Order within a priority is the order in which fair time sharing would finish the requests: each gets the tag
`virtual time at arrival + its work`, where work is rows x steps and virtual time advances by the work of each step
divided by the number of runnable requests (the fair sojourn protocol of Friedman and Henderson, 2003). A short request
overtakes a long one; as virtual time goes on, later arrivals come behind the long one, which therefore ends no later
than if it had had an equal share of the machine all the time. Equal requests are served in order of arrival. However
many are waiting, virtual time runs as if they were at most `_MAX_SHARERS`: overload does not stop it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

from omnistage.errors import IntegrityError
from omnistage.stages.diffusion.cost import CostCurve

Batching = Literal["step", "request"]

# A request joins a step if this costs at most so many times what a call of its own would cost in addition.
_PAYS = 1.25
_MAX_SHARERS = 8


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """`max_requests` and `max_rows` bound one step (a request of more rows runs alone). `stretch` bounds the expected
    time of a step in multiples of what the most urgent request would take alone (infinity: throughput only)."""

    max_requests: int
    max_rows: int
    batching: Batching = "step"
    stretch: float = math.inf


@dataclass(kw_only=True)
class Job:
    """What the scheduler knows of a request. `tag` is drawn when it first becomes runnable."""

    request_id: str
    priority: int
    group: Hashable
    rows: int
    steps: int
    ticket: int
    runnable: bool = False
    tag: float | None = None

    @property
    def rank(self) -> tuple[int, float, int]:
        return (-self.priority, self.tag if self.tag is not None else math.inf, self.ticket)


class StepScheduler:
    """Forms steps. Requests join with `add`, leave with `remove`; both, and `served`, come between steps."""

    def __init__(self, limits: StepLimits, curve: CostCurve | None = None) -> None:
        self.limits = limits
        self.curve = curve or CostCurve()
        self.virtual_time = 0.0
        self._jobs: dict[str, Job] = {}
        self._locked: set[str] = set()
        self._tickets = 0

    def add(self, request_id: str, *, priority: int, group: Hashable, rows: int, steps: int) -> None:
        self._tickets += 1
        self._jobs[request_id] = Job(
            request_id=request_id, priority=priority, group=group, rows=rows, steps=steps, ticket=self._tickets
        )

    def remove(self, request_id: str) -> None:
        """Forgets a request; unknown ids are ignored."""
        self._jobs.pop(request_id, None)
        self._locked.discard(request_id)

    def set_runnable(self, request_id: str, runnable: bool) -> None:
        job = self._jobs[request_id]
        job.runnable = runnable
        if runnable and job.tag is None:
            job.tag = self.virtual_time + job.rows * job.steps

    def resize(self, request_id: str, *, rows: int, steps: int) -> None:
        """Corrects an estimate: the request's work is now `rows` x `steps`."""
        job = self._jobs[request_id]
        if job.tag is not None:
            job.tag += rows * steps - job.rows * job.steps
        job.rows, job.steps = rows, steps

    def has_runnable(self) -> bool:
        """True when `schedule` would give a batch."""
        return any(job.runnable for job in self._candidates(None))

    def runnable_ids(self) -> frozenset[str]:
        return frozenset(job.request_id for job in self._jobs.values() if job.runnable)

    def schedule(self, only: frozenset[str] | None = None) -> tuple[str, ...]:
        """The requests of the next step, most urgent first, all of one group. `only` restricts the choice."""
        candidates = [job for job in self._candidates(only) if job.runnable]
        batch = self._fill(sorted(candidates, key=lambda job: job.rank))
        if self.limits.batching == "request" and only is None and not self._locked:
            self._locked = set(batch)
        return batch

    def served(self, request_ids: Iterable[str]) -> None:
        """Advances virtual time by the work of a step that these requests took."""
        work = sum(self._jobs[request_id].rows for request_id in request_ids)
        self.virtual_time += work / min(_MAX_SHARERS, max(1, len(self.runnable_ids())))

    def ids(self) -> frozenset[str]:
        return frozenset(self._jobs)

    def check_integrity(self) -> None:
        """Raises IntegrityError when a locked batch holds a request that is gone."""
        if not self._locked <= self._jobs.keys():
            raise IntegrityError(f"step scheduler: batch holds {sorted(self._locked - self._jobs.keys())}")

    def _candidates(self, only: frozenset[str] | None) -> Iterable[Job]:
        if only is not None:
            return [self._jobs[request_id] for request_id in only & self._jobs.keys()]
        if self._locked:
            return [self._jobs[request_id] for request_id in self._locked]
        return self._jobs.values()

    def _fill(self, ranked: list[Job]) -> tuple[str, ...]:
        """The most urgent job and whoever still fits behind it; one that does not fit blocks nobody."""
        if not ranked:
            return ()
        head = ranked[0]
        bound = self.limits.stretch * self.curve.seconds(head.rows)
        batch, rows = [head.request_id], head.rows
        for job in ranked[1:]:
            if len(batch) == self.limits.max_requests:
                break
            if job.group == head.group and self._joins(rows, job.rows, bound):
                batch.append(job.request_id)
                rows += job.rows
        return tuple(batch)

    def _joins(self, rows: int, more: int, bound: float) -> bool:
        if rows + more > self.limits.max_rows:
            return False
        together = self.curve.seconds(rows + more)
        apart = self.curve.seconds(rows) + self.curve.seconds(more)
        return together <= _PAYS * apart and together <= bound
