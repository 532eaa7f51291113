"""The engine of generation stages: batches any requests that have work, one `GenerationModel.run` per step.

Torch-free: only models import torch. Which requests share a step is decided by `_order`: priority first; then, with the
objective "ttfp", by when the listener needs the next packet: a request without output yet since it has had work, one
that gave sound when that sound has been played, others last; then first come, first served: a request that was served
goes to the end of the queue, so that none starves.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from math import inf
from time import monotonic
from typing import Generic, TypeVar

from omnistage.config.model import StageConfig
from omnistage.errors import IntegrityError, StageError
from omnistage.faults import Faults
from omnistage.request import FinishReason, StageMetrics
from omnistage.stages.base import Computed, Emission, Finished, InputChunk, StageRequest, StepOutput
from omnistage.stages.generation.model import GenerationModel, Produced

S = TypeVar("S")


@dataclass(slots=True, eq=False)
class _Entry(Generic[S]):
    """One request: its model state and what the scheduler knows. Times in seconds (monotonic).

    `ticket` is its place in the queue, drawn when it gets work and again whenever it was served. `due` is when the
    sound it gave has been played, if it is played from the first packet on without a stop.
    """

    request: StageRequest
    state: S
    held: bool = False
    ticket: int = 0
    ready_since: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    steps: int = 0
    chunks_out: int = 0
    due: float = inf


class GenerationEngine(Generic[S]):
    """`omnistage.stages.base.StageEngine` over a `GenerationModel`."""

    def __init__(
        self,
        model: GenerationModel[S],
        config: StageConfig,
        faults: Faults | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._model = model
        self._faults = faults or Faults()
        self._name = config.name
        self._max_num_seqs = config.max_num_seqs
        self._first_output_first = config.objective == "ttfp"
        self._entries: dict[str, _Entry[S]] = {}
        self._ready: set[str] = set()
        self._steps = 0
        self._tickets = count()
        self._last_batch: tuple[str, ...] = ()
        self._totals: dict[str, float] = dict.fromkeys(("batch_rows", "chunks_out", "finished", "aborted"), 0)

    def add(self, request: StageRequest) -> None:
        """Takes a request. Raises RequestError when the model refuses it, StageError when the id is in use."""
        if request.request_id in self._entries:
            raise StageError("the stage already holds a request of this id", stage=self._name)
        self._entries[request.request_id] = _Entry(request, self._model.open(request))
        self._refresh(request.request_id)

    def feed(self, chunk: InputChunk) -> None:
        """Hands a chunk to the model. When the model refuses it, its payload is released here."""
        entry = self._entries[chunk.request_id]
        taken = False
        try:
            self._model.feed(entry.state, chunk)
            taken = True
        finally:
            if not taken:
                chunk.payload.release()
        self._refresh(chunk.request_id)

    def abort(self, request_id: str) -> None:
        if request_id in self._entries:
            self._drop(request_id)
            self._totals["aborted"] += 1

    def hold(self, request_id: str, held: bool) -> None:
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.held = held
            self._refresh(request_id)

    def has_work(self) -> bool:
        return bool(self._ready)

    def step(self, only: frozenset[str] | None = None) -> StepOutput:
        """One batched run. When the model raises, every request is as it was: `GenerationModel.run` commits last."""
        batch = self._order(self._ready if only is None else self._ready & only)
        if not batch:
            return StepOutput()
        entries = [self._entries[request_id] for request_id in batch]
        start = self._clock()
        self._faults.hit("before_run")
        produced = self._model.run([entry.state for entry in entries])
        self._faults.hit("after_run")
        seconds = self._clock() - start
        self._steps += 1
        self._last_batch = batch
        self._totals["batch_rows"] += len(batch)
        emissions: list[Emission] = []
        finished: list[Finished] = []
        for entry, chunks in zip(entries, produced, strict=True):
            self._account(entry, chunks, start, seconds)
            emissions += [_emission(entry.request.request_id, chunk) for chunk in chunks]
            finished += self._finish(entry)
        spans = [Computed("run", start, start + seconds)]
        return StepOutput(emissions=emissions, finished=finished, batch=batch, spans=spans)

    def request_ids(self) -> frozenset[str]:
        return frozenset(self._entries)

    def counters(self) -> dict[str, float]:
        """`running` + `waiting` = requests held; `waiting` have work but were not in the last batch.

        The model's own counts (`StageMetrics.extra`, such as `frames_in`) are summed over all requests ever held.
        """
        waiting = len(self._ready.difference(self._last_batch))
        counts = {"running": len(self._entries) - waiting, "waiting": waiting, "steps": self._steps}
        counts["held"] = sum(entry.held for entry in self._entries.values())
        totals = dict(self._totals)
        for entry in self._entries.values():
            _add_counts(totals, self._model.metrics(entry.state))
        return counts | totals

    def check_integrity(self) -> None:
        """Every request with work is in the ready set, and no other id is. Raises IntegrityError."""
        runnable = {request_id for request_id, entry in self._entries.items() if self._is_runnable(entry)}
        if runnable != self._ready:
            raise IntegrityError(f"stage {self._name}: ready set differs for {sorted(runnable ^ self._ready)}")

    def close(self) -> None:
        for request_id in list(self._entries):
            self._drop(request_id)

    def _order(self, ready: Iterable[str]) -> tuple[str, ...]:
        return tuple(heapq.nsmallest(self._max_num_seqs, ready, key=self._rank))

    def _rank(self, request_id: str) -> tuple[int, float, int]:
        entry = self._entries[request_id]
        if not self._first_output_first:
            return (-entry.request.priority, 0.0, entry.ticket)
        due = entry.due if entry.chunks_out else entry.ready_since
        return (-entry.request.priority, due, entry.ticket)

    def _is_runnable(self, entry: _Entry[S]) -> bool:
        return not entry.held and self._model.pending(entry.state) > 0

    def _refresh(self, request_id: str) -> None:
        entry = self._entries[request_id]
        if not self._is_runnable(entry):
            self._ready.discard(request_id)
        elif request_id not in self._ready:
            self._ready.add(request_id)
            entry.ready_since = self._clock()
            entry.ticket = next(self._tickets)

    def _account(self, entry: _Entry[S], chunks: list[Produced], start: float, seconds: float) -> None:
        entry.queue_s += max(0.0, start - entry.ready_since)
        entry.ready_since = start + seconds
        entry.compute_s += seconds
        entry.steps += 1
        entry.ticket = next(self._tickets)
        entry.chunks_out += len(chunks)
        sound = sum(_seconds(chunk) for chunk in chunks)
        if sound:
            entry.due = (start + seconds if entry.due == inf else entry.due) + sound
        self._totals["chunks_out"] += len(chunks)

    def _finish(self, entry: _Entry[S]) -> list[Finished]:
        request_id = entry.request.request_id
        if not self._model.done(entry.state):
            self._refresh(request_id)
            return []
        metrics = self._model.metrics(entry.state)
        metrics.queue_s, metrics.compute_s = entry.queue_s, entry.compute_s
        metrics.steps, metrics.chunks_out = entry.steps, entry.chunks_out
        self._drop(request_id)
        self._totals["finished"] += 1
        return [Finished(request_id=request_id, reason=FinishReason.STOP, metrics=metrics)]

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        self._ready.discard(request_id)
        _add_counts(self._totals, self._model.metrics(entry.state))
        self._model.close(entry.state)


def _seconds(chunk: Produced) -> float:
    """How long the chunk's sound plays; 0 for anything else."""
    rate = chunk.payload.meta.get("sample_rate")
    if not rate or "audio" not in chunk.payload.tensors:
        return 0.0
    return float(chunk.payload["audio"].shape[-1] / rate)


def _emission(request_id: str, chunk: Produced) -> Emission:
    return Emission(request_id=request_id, port=chunk.port, payload=chunk.payload, final=chunk.final)


def _add_counts(totals: dict[str, float], metrics: StageMetrics) -> None:
    for name, value in metrics.extra.items():
        totals[name] = totals.get(name, 0) + value
