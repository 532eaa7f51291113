"""Step caches: leaving out the middle of a denoiser at steps where it would add nearly what it added before.

A denoiser is `head(stack(rows))`. At a step that runs, what the stack adds (`stack(rows) - rows`) is kept; at a step
that is left out, it is added again. `StepCache` says when.

Memory belongs to one document (one guidance branch of a request, or all of them); in a batch each decides for itself,
the others are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from omnistage.ops.step_policy import StepCache

__all__ = ["CacheMemory", "CacheTurn", "CachedStack", "Selection", "StepCache", "cached_stack"]


@dataclass(frozen=True)
class CacheMemory:
    """What is kept between steps; a step makes a new one. `change` is summed since the last run."""

    added: Tensor | None = None
    signal: Tensor | None = None
    change: float = 0.0
    skipped: int = 0

    def seen(self, signal: Tensor) -> CacheMemory:
        """With the change that `signal` brings."""
        if self.signal is None:
            return replace(self, signal=signal)
        step = float((signal - self.signal).abs().mean() / self.signal.abs().mean().clamp_min(1e-12))
        return replace(self, signal=signal, change=self.change + step)

    def emptied(self) -> CacheMemory:
        """Only the count is left: for the next run, or when there is none."""
        return CacheMemory(skipped=self.skipped)


class CacheTurn(NamedTuple):
    """One document at one step. No `cache`: it always runs, and nothing is kept."""

    cache: StepCache | None = None
    memory: CacheMemory = CacheMemory()
    step: int = 0
    steps: int = 1

    @property
    def is_due(self) -> bool:
        return self.cache is None or self.memory.added is None or self.cache.is_due(*self._state)

    @property
    def is_last(self) -> bool:
        return self.step == self.steps - 1

    @property
    def _state(self) -> tuple[float, int, int]:
        return self.memory.change, self.step, self.steps


class Selection(NamedTuple):
    """The part of a call that runs: numbers of its documents, and of its rows (None: all)."""

    documents: list[int]
    rows: Tensor | None

    def of(self, per_row: Tensor) -> Tensor:
        """The entries of the rows that run."""
        return per_row if self.rows is None else per_row[self.rows]


# `stack(rows that run, which these are)`.
Stack = Callable[[Tensor, Selection], Tensor]
# `signal(first, last)`: the watched tensor of the rows `first` to `last` (not included).
Signal = Callable[[int, int], Tensor]


def cached_stack(
    stack: Stack, rows: Tensor, signal: Signal, lengths: Sequence[int], turns: Sequence[CacheTurn]
) -> tuple[Tensor, list[CacheMemory]]:
    """`stack(rows)`, left out for documents whose cache allows it; and every document's new memory.

    `rows` [rows, ...] are those of the documents one after the other, `lengths` of them each.
    """
    spans = list(pairwise(accumulate(lengths, initial=0)))
    looked = [
        turn._replace(memory=turn.memory.seen(signal(*span))) if turn.cache else turn
        for turn, span in zip(turns, spans, strict=True)
    ]
    due = [turn.is_due for turn in looked]
    output = _run(stack, rows, spans, [index for index, runs in enumerate(due) if runs])
    memories: list[CacheMemory] = []
    for turn, (first, last), runs in zip(looked, spans, due, strict=True):
        memory, part = turn.memory, slice(first, last)
        if not runs and memory.added is not None:
            output[part] = rows[part] + memory.added
            memory = replace(memory, skipped=memory.skipped + 1)
        elif turn.cache is not None:
            memory = memory.emptied() if turn.is_last else replace(memory, added=output[part] - rows[part], change=0.0)
        memories.append(memory)
    return output, memories


def _run(stack: Stack, rows: Tensor, spans: list[tuple[int, int]], running: list[int]) -> Tensor:
    if len(running) == len(spans):
        return stack(rows, Selection(running, None))
    output = torch.empty_like(rows)
    if running:
        chosen = torch.cat([torch.arange(*spans[index], device=rows.device) for index in running])
        output[chosen] = stack(rows[chosen], Selection(running, chosen))
    return output


class _Turned(Protocol):
    @property
    def turn(self) -> CacheTurn: ...


D = TypeVar("D", bound=_Turned)


class CachedStack(nn.Module, Generic[D]):
    """Stands for the middle of a transformer: `begin` sets the documents of a call, `forward` leaves the middle out for
    those whose cache allows it, by `through`, and `end` gives what each is to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.documents: Sequence[D] = ()
        self._memories: list[CacheMemory] = []

    def begin(self, documents: Sequence[D]) -> None:
        self.documents = documents

    def through(self, stack: Stack, rows: Tensor, signal: Signal, lengths: Sequence[int]) -> Tensor:
        turns = [document.turn for document in self.documents]
        output, self._memories = cached_stack(stack, rows, signal, lengths, turns)
        return output

    def end(self) -> list[CacheMemory]:
        memories, self._memories, self.documents = self._memories, [], ()
        return memories
