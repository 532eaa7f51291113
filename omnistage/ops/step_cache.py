"""Step caches: leaving out the middle of a denoiser at steps where it would add nearly what it added before.

A denoiser is `head(stack(rows))`. At a step that runs, what the stack adds (`stack(rows) - rows`) is kept; at a step
that is left out, it is added again. The first and the last step always run. Two policies:

- relative_change: run once the signal (the input of the first block) has changed by `threshold` since the last run,
  summed over steps as mean |difference| / mean |signal|. After TeaCache (Liu et al., 2024, arXiv:2411.19108).
- fixed_budget: exactly `runs` steps run, evenly spread.

Memory belongs to one request; in a batch each request decides for itself, the others are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

Stack = Callable[[Tensor, Tensor], Tensor]


class StepCache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request's parameter `step_cache`; each kind reads its own number."""

    kind: Literal["relative_change", "fixed_budget"]
    threshold: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.2
    runs: Annotated[int, msgspec.Meta(ge=2, le=1000)] = 8

    def is_due(self, memory: CacheMemory, step: int, steps: int) -> bool:
        """True when the stack must run at `step` (from 0) of `steps`."""
        if memory.added is None or step in (0, steps - 1):
            return True
        if self.kind == "relative_change":
            return memory.change > self.threshold
        return step in {round(at * (steps - 1) / (self.runs - 1)) for at in range(self.runs)}


@dataclass(frozen=True)
class CacheMemory:
    """What a request keeps between steps; a step makes a new one. `change` is summed since the last run."""

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


class CacheSlot(NamedTuple):
    """The documents `first` to `last` (not included) of a call: those of one request. No `cache`: they always run."""

    first: int
    last: int
    cache: StepCache | None
    memory: CacheMemory
    step: int
    steps: int


def cached_stack(
    stack: Stack, rows: Tensor, modulation: Tensor, signal: Callable[[int, int], Tensor], slots: Sequence[CacheSlot]
) -> tuple[Tensor, list[CacheMemory]]:
    """`stack(rows, modulation)`, left out for requests whose cache allows it; and every request's new memory.

    `rows` [documents, ...], `modulation` [documents, ...]; `signal(first, last)` gives the watched tensor of documents.
    """
    looked = [slot.memory.seen(signal(slot.first, slot.last)) if slot.cache else slot.memory for slot in slots]
    due = [_is_due(slot, memory) for slot, memory in zip(slots, looked, strict=True)]
    output = _run(stack, rows, modulation, [slot for slot, runs in zip(slots, due, strict=True) if runs], len(slots))
    memories: list[CacheMemory] = []
    for slot, memory, runs in zip(slots, looked, due, strict=True):
        part = slice(slot.first, slot.last)
        if not runs and memory.added is not None:
            output[part] = rows[part] + memory.added
            memory = replace(memory, skipped=memory.skipped + 1)
        elif slot.cache is not None:
            memory = replace(memory, added=output[part] - rows[part], change=0.0)
        memories.append(memory)
    return output, memories


def _is_due(slot: CacheSlot, memory: CacheMemory) -> bool:
    return slot.cache is None or slot.cache.is_due(memory, slot.step, slot.steps)


def _run(stack: Stack, rows: Tensor, modulation: Tensor, slots: list[CacheSlot], all_slots: int) -> Tensor:
    if len(slots) == all_slots:
        return stack(rows, modulation)
    output = torch.empty_like(rows)
    if slots:
        chosen = torch.cat([torch.arange(slot.first, slot.last, device=rows.device) for slot in slots])
        output[chosen] = stack(rows[chosen], modulation[chosen])
    return output
