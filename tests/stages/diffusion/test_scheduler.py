"""The step scheduler: who shares a step, who goes first, who never starves."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from omnistage.errors import IntegrityError
from omnistage.stages.diffusion.cost import CostCurve
from omnistage.stages.diffusion.scheduler import Batching, StepLimits, StepScheduler


def make(
    *, requests: int = 8, rows: int = 1000, batching: Batching = "step", stretch: float = math.inf, **more: Any
) -> StepScheduler:
    limits = StepLimits(max_requests=requests, max_rows=rows, batching=batching, stretch=stretch)
    return StepScheduler(limits, **more)


def add(scheduler: StepScheduler, name: str, *, rows: int = 10, steps: int = 10, priority: int = 0) -> None:
    scheduler.add(name, priority=priority, group="", rows=rows, steps=steps)
    scheduler.set_runnable(name, True)


class Run:
    """Plays steps; a request leaves after its last one. `ends` is the work done by the whole machine until then."""

    def __init__(self, scheduler: StepScheduler) -> None:
        self.scheduler = scheduler
        self.left: dict[str, int] = {}
        self.rows: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self.work = 0

    def add(self, name: str, *, rows: int, steps: int, priority: int = 0) -> None:
        add(self.scheduler, name, rows=rows, steps=steps, priority=priority)
        self.left[name], self.rows[name] = steps, rows

    def step(self) -> tuple[str, ...]:
        batch = self.scheduler.schedule()
        self.scheduler.served(batch)
        self.work += sum(self.rows[name] for name in batch)
        for name in batch:
            self.left[name] -= 1
            if self.left[name] == 0:
                self.scheduler.remove(name)
                self.ends[name] = self.work
        return batch


def test_everybody_shares_a_step_while_rows_last() -> None:
    scheduler = make(rows=35)
    for name in "abcd":
        add(scheduler, name)
    assert scheduler.schedule() == ("a", "b", "c")


def test_max_requests_bounds_a_step() -> None:
    scheduler = make(requests=2)
    for name in "abc":
        add(scheduler, name)
    assert scheduler.schedule() == ("a", "b")


def test_a_request_that_does_not_fit_blocks_nobody_behind_it() -> None:
    scheduler = make(rows=100)
    add(scheduler, "a", rows=60, steps=1)
    add(scheduler, "big", rows=90, steps=1)
    add(scheduler, "small", rows=10, steps=10)
    assert scheduler.schedule() == ("a", "small")


def test_a_request_larger_than_the_budget_runs_alone() -> None:
    scheduler = make(rows=100)
    add(scheduler, "huge", rows=500, steps=1)
    add(scheduler, "small", rows=10, steps=60)
    assert scheduler.schedule() == ("huge",)


def test_equal_requests_are_served_in_order_of_arrival() -> None:
    scheduler = make(requests=1)
    run = Run(scheduler)
    for name in "abc":
        run.add(name, rows=10, steps=3)
    while run.left.keys() - run.ends.keys():
        run.step()
    assert list(run.ends) == ["a", "b", "c"]


def test_a_short_request_overtakes_a_long_one() -> None:
    run = Run(make(requests=1))
    run.add("long", rows=100, steps=50)
    run.step()
    run.add("short", rows=10, steps=4)
    assert [run.step() for _ in range(4)] == [("short",)] * 4


@pytest.mark.parametrize("every", [1, 2])
def test_a_long_request_progresses_under_an_endless_stream_of_short_ones(every: int) -> None:
    """A short request of two steps comes every second step (full load) or every step (twice what can be served)."""
    run = Run(make(requests=1))
    run.add("long", rows=100, steps=3)
    steps = 0
    while "long" not in run.ends:
        if steps % every == 0:
            run.add(f"short{steps}", rows=10, steps=2)
        run.step()
        steps += 1
        assert steps < 1000


@pytest.mark.parametrize("seed", range(5))
def test_nobody_ends_much_later_than_under_equal_time_sharing(seed: int) -> None:
    draw = random.Random(seed)
    jobs = {f"j{i}": (draw.choice([5, 20, 80]), draw.randint(1, 12)) for i in range(12)}
    run = Run(make(requests=1))
    for name, (rows, steps) in jobs.items():
        run.add(name, rows=rows, steps=steps)
    while len(run.ends) < len(jobs):
        run.step()
    for name, (rows, steps) in jobs.items():
        shared = sum(min(r * s, rows * steps) for r, s in jobs.values())  # when time sharing would end it
        assert run.ends[name] <= shared + 80, name


def test_priority_goes_before_everything_else() -> None:
    scheduler = make(requests=1)
    add(scheduler, "first", steps=1)
    add(scheduler, "urgent", steps=50, priority=1)
    assert scheduler.schedule() == ("urgent",)


def test_only_requests_of_one_group_share_a_step() -> None:
    scheduler = make()
    for name, group in (("a", "x"), ("b", "y"), ("c", "x")):
        scheduler.add(name, priority=0, group=group, rows=10, steps=5)
        scheduler.set_runnable(name, True)
    assert scheduler.schedule() == ("a", "c")
    scheduler.served(("a", "c"))
    scheduler.remove("a")
    scheduler.remove("c")
    assert scheduler.schedule() == ("b",)


def test_request_batching_lets_nobody_in_until_the_batch_has_left() -> None:
    scheduler = make(batching="request")
    add(scheduler, "a")
    add(scheduler, "b")
    assert scheduler.schedule() == ("a", "b")
    add(scheduler, "c", steps=1)
    scheduler.remove("a")
    assert scheduler.schedule() == ("b",)
    scheduler.remove("b")
    assert scheduler.schedule() == ("c",)


def test_a_locked_batch_that_waits_is_no_work() -> None:
    scheduler = make(batching="request")
    add(scheduler, "a")
    scheduler.schedule()
    scheduler.set_runnable("a", False)
    add(scheduler, "b")
    assert not scheduler.has_runnable()


def test_a_latency_objective_keeps_a_large_request_out_of_a_small_ones_step() -> None:
    scheduler = make(stretch=4.0)
    add(scheduler, "small", rows=10, steps=2)
    add(scheduler, "large", rows=400, steps=9)
    add(scheduler, "medium", rows=25, steps=9)
    assert scheduler.schedule() == ("small", "medium")


def test_the_measured_curve_keeps_out_what_does_not_pay() -> None:
    """Beyond 100 rows this machine slows down: two calls are then cheaper than one."""
    scheduler = make(curve=CostCurve(((50, 1.0), (100, 2.0), (200, 9.0))))
    for name in "abcd":
        add(scheduler, name, rows=50)
    assert scheduler.schedule() == ("a", "b")


def test_a_corrected_size_moves_a_request_to_its_place() -> None:
    scheduler = make(requests=1)
    add(scheduler, "a", rows=10, steps=5)
    add(scheduler, "b", rows=10, steps=6)
    scheduler.resize("a", rows=100, steps=5)
    assert scheduler.schedule() == ("b",)


def test_only_restricts_the_choice() -> None:
    scheduler = make()
    for name in "abc":
        add(scheduler, name)
    assert scheduler.schedule(frozenset({"b", "gone"})) == ("b",)


def test_a_batch_that_holds_a_request_that_is_gone_is_found() -> None:
    scheduler = make(batching="request")
    add(scheduler, "a")
    scheduler.schedule()
    scheduler._jobs.clear()
    with pytest.raises(IntegrityError, match="a"):
        scheduler.check_integrity()
