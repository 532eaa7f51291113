from __future__ import annotations

import time

import pytest

from omnistage.errors import IntegrityError
from omnistage.stages.ar.block_pool import BlockPool
from omnistage.stages.ar.model import Work
from omnistage.stages.ar.scheduler import Scheduler
from omnistage.stages.ar.sequence import Prompt, Sequence, Status
from tests.stages.ar.fakes import stage_request


def scheduler(*, blocks: int = 64, block_size: int = 4, budget: int = 16, seqs: int = 8) -> Scheduler[None]:
    return Scheduler(BlockPool(blocks, block_size), token_budget=budget, max_num_seqs=seqs, prefix_caching=True)


def waiting(
    owner: Scheduler[None], arrival: int, length: int, *, priority: int = 0, spans: tuple[tuple[int, int], ...] = ()
) -> Sequence[None]:
    request = stage_request(f"r{arrival}", priority=priority)
    seq: Sequence[None] = Sequence(request, None, arrival, 0.0)
    seq.begin(Prompt(token_ids=[arrival] * length, unsplittable=spans), 500, frozenset())
    owner.add(seq)
    return seq


def shown(works: list[Work[None]]) -> list[tuple[str, int, int, bool]]:
    return [(work.seq.request_id, work.start, work.stop, work.sample) for work in works]


def step(owner: Scheduler[None]) -> list[tuple[str, int, int, bool]]:
    works = owner.schedule()
    owner.stepped(works)
    for work in works:
        owner.advance(work, 1 if work.sample else None)
    owner.check_integrity()
    return shown(works)


def test_generating_rows_come_first_then_chunks_up_to_the_budget() -> None:
    owner = scheduler()
    waiting(owner, 0, 3)
    assert step(owner) == [("r0", 0, 3, True)]
    waiting(owner, 1, 20)
    waiting(owner, 2, 5)
    assert step(owner) == [("r0", 3, 4, True), ("r1", 0, 15, False)]
    assert step(owner) == [("r0", 4, 5, True), ("r1", 15, 20, True), ("r2", 0, 5, True)]
    assert owner.stats.mixed_steps == 2


def test_a_schedule_that_is_not_computed_can_be_made_again() -> None:
    owner = scheduler()
    waiting(owner, 0, 3)
    waiting(owner, 1, 30)
    assert shown(owner.schedule()) == shown(owner.schedule())
    owner.check_integrity()


def test_an_unsplittable_span_waits_for_a_step_that_it_leads() -> None:
    owner = scheduler(budget=8)
    waiting(owner, 0, 6)
    waiting(owner, 1, 14, spans=((1, 13),))
    assert step(owner) == [("r0", 0, 6, True), ("r1", 0, 1, False)]
    assert step(owner) == [("r0", 6, 7, True), ("r1", 1, 13, False)]
    assert step(owner) == [("r0", 7, 8, True), ("r1", 13, 14, True)]


def test_admission_is_in_order_and_stops_at_the_first_that_finds_no_room() -> None:
    owner = scheduler(blocks=4, budget=64)
    waiting(owner, 0, 8)
    waiting(owner, 1, 12)
    waiting(owner, 2, 2)
    assert [name for name, *_ in shown(owner.schedule())] == ["r0"]
    assert (owner.running, owner.waiting) == (1, 2)


def test_priority_outranks_arrival() -> None:
    owner = scheduler(seqs=1, budget=64)
    waiting(owner, 0, 3)
    waiting(owner, 1, 3, priority=5)
    assert [name for name, *_ in shown(owner.schedule())] == ["r1"]


def test_the_last_in_rank_gives_way_when_no_block_is_left() -> None:
    owner = scheduler(blocks=4, budget=64)
    first, second = waiting(owner, 0, 7), waiting(owner, 1, 6)
    step(owner)
    step(owner)
    step(owner)
    assert second.status is Status.WAITING
    assert (second.blocks, second.computed) == ([], 0)
    assert len(first.blocks) == 3
    assert owner.stats.preemptions == 1


def test_woken_sequences_beyond_max_num_seqs_wait_for_a_place() -> None:
    owner = scheduler(seqs=2)
    parked = [waiting(owner, index, 2) for index in range(2)]
    step(owner)
    for seq in parked:
        seq.ready = False
        owner.refresh(seq)
    waiting(owner, 2, 2)
    waiting(owner, 3, 2)
    step(owner)
    for seq in parked:
        seq.ready = True
        owner.refresh(seq)
    assert [name for name, *_ in step(owner)] == ["r0", "r1"]


def test_integrity_check_finds_a_leaked_block() -> None:
    owner = scheduler()
    seq = waiting(owner, 0, 6)
    owner.schedule()
    seq.blocks.pop()
    with pytest.raises(IntegrityError, match="another number of sequences"):
        owner.check_integrity()


def test_integrity_check_finds_a_sequence_in_the_wrong_list() -> None:
    owner = scheduler()
    seq = waiting(owner, 0, 6)
    owner.schedule()
    seq.held = True
    with pytest.raises(IntegrityError, match="r0 is running in the list running"):
        owner.check_integrity()


def test_scheduling_time_does_not_grow_with_the_queue() -> None:
    def fastest(queued: int) -> float:
        owner = scheduler(blocks=8192, block_size=16, budget=512, seqs=64)
        for index in range(64 + queued):
            waiting(owner, index, 8)
        for _ in range(3):
            step(owner)
        times = []
        for _ in range(40):
            started = time.perf_counter()
            works = owner.schedule()
            times.append(time.perf_counter() - started)
            assert len(works) == 64
            for work in works:
                owner.advance(work, 1)
        return min(times)

    assert fastest(1000) < 2 * fastest(0) + 50e-6
    assert fastest(1000) < 500e-6
