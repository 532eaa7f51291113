"""Step caches: which steps run, and that a request's cache is its own affair."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from omnistage.ops.step_cache import CacheMemory, CacheTurn, Selection, StepCache, cached_stack


class Doubling:
    """A stack that doubles its rows and notes how many documents it was given."""

    def __init__(self) -> None:
        self.documents: list[int] = []

    def __call__(self, rows: Tensor, chosen: Selection) -> Tensor:
        self.documents.append(len(chosen.documents))
        return rows * 2


def part_of(rows: Tensor, first: int, last: int) -> Tensor:
    return rows[first:last]


def runs_of(cache: StepCache, steps: int, signals: list[float]) -> list[int]:
    """The steps at which the stack ran, for one request whose signal takes these values."""
    memory, ran = CacheMemory(), []
    for step in range(steps):
        stack = Doubling()
        value = torch.full((1, 4), signals[step])
        turn = CacheTurn(cache, memory, step, steps)
        _, (memory,) = cached_stack(stack, value, partial(part_of, value), [1], [turn])
        ran += [step] if stack.documents else []
    assert memory.skipped == steps - len(ran)
    return ran


@pytest.mark.parametrize(("runs", "steps"), [(2, 9), (5, 9), (4, 20), (20, 20), (30, 20)])
def test_fixed_budget_runs_exactly_so_many_steps_first_and_last_among_them(runs: int, steps: int) -> None:
    ran = runs_of(StepCache(kind="fixed_budget", runs=runs), steps, [1.0] * steps)
    assert len(ran) == min(runs, steps)
    assert ran[0] == 0
    assert ran[-1] == steps - 1


def test_relative_change_runs_when_the_signal_has_moved_enough_since_the_last_run() -> None:
    signals = [1.0, 1.05, 1.1, 1.15, 2.0, 2.0, 2.0]
    assert runs_of(StepCache(kind="relative_change", threshold=0.12), 7, signals) == [0, 3, 4, 6]


def test_threshold_zero_skips_only_where_nothing_changes() -> None:
    assert runs_of(StepCache(kind="relative_change", threshold=0.0), 5, [1.0, 1.1, 1.1, 1.2, 1.3]) == [0, 1, 3, 4]


def test_skipped_request_gets_what_the_stack_added_last_time_and_the_others_run() -> None:
    cache = StepCache(kind="fixed_budget", runs=2)
    stack = Doubling()
    rows = torch.tensor([[1.0], [2.0], [3.0]])
    memory = CacheMemory(added=torch.tensor([[10.0], [20.0]]), signal=rows[:2])
    turns = [CacheTurn(cache, memory, 1, 5), CacheTurn(None, CacheMemory(), 1, 5)]
    output, memories = cached_stack(stack, rows, lambda a, b: rows[a:b], [2, 1], turns)
    assert output.tolist() == [[11.0], [22.0], [6.0]]
    assert stack.documents == [1]
    assert [m.skipped for m in memories] == [1, 0]


def test_nothing_is_kept_for_requests_without_a_cache() -> None:
    rows = torch.ones(2, 1)
    _, (memory,) = cached_stack(Doubling(), rows, lambda a, b: rows[a:b], [2], [CacheTurn(None, CacheMemory(), 0, 5)])
    assert memory == CacheMemory()


def test_memory_given_is_not_changed() -> None:
    """A step that fails later can be repeated."""
    memory = CacheMemory()
    rows = torch.ones(1, 1)
    turn = CacheTurn(StepCache(kind="relative_change"), memory, 0, 5)
    cached_stack(Doubling(), rows, lambda a, b: rows[a:b], [1], [turn])
    assert memory == CacheMemory()


def test_rows_that_run_are_told_which_they_are() -> None:
    cache = StepCache(kind="fixed_budget", runs=2)
    rows = torch.arange(5.0)[:, None]
    memory = CacheMemory(added=torch.zeros(2, 1), signal=rows[:2])
    seen: list[Tensor] = []

    def stack(part: Tensor, chosen: Selection) -> Tensor:
        seen.append(chosen.of(torch.arange(5)))
        return part

    turns = [CacheTurn(None, CacheMemory(), 1, 5), CacheTurn(cache, memory, 1, 5), CacheTurn(None, CacheMemory(), 1, 5)]
    cached_stack(stack, rows, lambda a, b: rows[a:b], [1, 2, 2], turns)
    assert [part.tolist() for part in seen] == [[0, 3, 4]]


def test_last_step_leaves_only_the_count() -> None:
    rows = torch.ones(1, 1)
    turn = CacheTurn(StepCache(kind="relative_change"), CacheMemory(rows, rows, 0.0, 3), 4, 5)
    _, (memory,) = cached_stack(Doubling(), rows, lambda a, b: rows[a:b], [1], [turn])
    assert memory == CacheMemory(skipped=3)
