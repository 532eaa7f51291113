"""The engine of diffusion stages: one transformer call per tick for whichever requests the step scheduler picks.

Torch-free: only models import torch. A request is encoded and prepared when its first turn comes, takes one step per
turn, and is then decoded on a worker thread beside the steps of the others. `step` and `request` batching are two
policies of the scheduler, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from time import monotonic
from typing import Generic, TypeVar

from omnistage.config.model import StageConfig
from omnistage.errors import ConfigError, IntegrityError, RequestError, StageError
from omnistage.faults import Faults
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason, StageMetrics
from omnistage.stages.base import Computed, Emission, Finished, InputChunk, StageRequest, StepOutput
from omnistage.stages.diffusion.decoding import DecodeQueue, DecodeResult
from omnistage.stages.diffusion.entry import Entry, Phase
from omnistage.stages.diffusion.model import PARTIAL_PORT, PROGRESS_PORT, Capabilities, DiffusionModel
from omnistage.stages.diffusion.scheduler import Batching, StepLimits, StepScheduler

S = TypeVar("S")

# Bound on a step's expected time, in multiples of the most urgent request's own, unless throughput is all that counts.
_LATENCY_STRETCH = 4.0


class DiffusionEngine(Generic[S]):
    """`omnistage.stages.base.StageEngine` over a `DiffusionModel`.

    `wake` is called from the decode thread when it has finished something. `executor` and `clock` (seconds) are for
    tests that keep time themselves.
    """

    def __init__(
        self,
        model: DiffusionModel[S],
        config: StageConfig,
        wake: Callable[[], None],
        *,
        executor: Executor | None = None,
        clock: Callable[[], float] = monotonic,
        faults: Faults | None = None,
    ) -> None:
        self._model = model
        self._faults = faults or Faults()
        self._name = config.name
        self._clock = clock
        self._entries: dict[str, Entry[S]] = {}
        self._scheduler = StepScheduler(step_limits(config, model.capabilities))
        self._executor = executor or ThreadPoolExecutor(1, f"{config.name}-decode")
        batch = config.max_num_seqs if model.capabilities.batched_decode else 1
        self._decodes = DecodeQueue(model, self._executor, wake, clock=clock, max_batch=batch)
        self._last_batch: tuple[str, ...] = ()
        self._totals: dict[str, float] = dict.fromkeys(
            ("steps", "ticks", "transformer_calls", "batch_rows", "batch_requests", "finished", "aborted"), 0
        )

    # -- the StageEngine contract

    def add(self, request: StageRequest) -> None:
        """Takes a request. Raises RequestError when the model refuses it, StageError when the id is in use."""
        request_id = request.request_id
        if request_id in self._entries:
            raise StageError("the stage already holds a request of this id", stage=self._name)
        if PARTIAL_PORT in request.outputs and not self._model.capabilities.partial_images:
            raise RequestError("this model gives no partial pictures", param="partial_images")
        state = self._model.open(request)
        entry = Entry(request, state, self._totals["ticks"])
        entry.steps = self._model.remaining(state)
        self._entries[request_id] = entry
        self._scheduler.add(
            request_id,
            priority=request.priority,
            group=self._model.group(state),
            rows=self._model.rows(state),
            steps=max(1, entry.steps),
        )
        self._refresh(entry)

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
        self._refresh(entry)

    def abort(self, request_id: str) -> None:
        if request_id in self._entries:
            self._drop(self._entries[request_id])
            self._totals["aborted"] += 1

    def hold(self, request_id: str, held: bool) -> None:
        """A held request goes on denoising, which emits nothing that must arrive; its decode waits."""
        if request_id in self._entries:
            self._entries[request_id].held = held

    def has_work(self) -> bool:
        return self._scheduler.has_runnable() or self._decodes.has_work()

    def step(self, only: frozenset[str] | None = None) -> StepOutput:
        """One tick: encode and prepare newcomers, one transformer call, emit what the decode thread has finished.

        Raises what the model raises; a failed decode raises in the tick of its request, before anything else is done.
        """
        self._decodes.raise_failed(only)
        output = StepOutput()
        rows: tuple[int, ...] = ()
        batch = [self._entries[request_id] for request_id in self._scheduler.schedule(only)]
        if batch:
            rows = tuple(max(1, self._model.rows(entry.state)) for entry in batch)
            self._advance(batch, output)
        decoded = self._decodes.collect(only)
        for result in decoded:
            self._emit_decoded(result, output)
        self._decodes.submit(only)
        self._last_batch = tuple(entry.id for entry in batch)
        output.batch = (*self._last_batch, *(result.entry.id for result in decoded))
        output.rows = (*rows, *(1 for _ in decoded))
        return output

    def request_ids(self) -> frozenset[str]:
        return frozenset(self._entries)

    def counters(self) -> dict[str, float]:
        """`running` + `waiting` = requests held; `waiting` could step but were not in the last batch.

        `steps` sums over requests, `transformer_calls` and `ticks` over steps of the engine (equal by construction of
        `DiffusionModel.denoise`); `batch_rows` / `ticks` is the mean size of a call. `*_s` are seconds of each phase.
        """
        waiting = len(self._scheduler.runnable_ids().difference(self._last_batch))
        counts: dict[str, float] = {"running": len(self._entries) - waiting, "waiting": waiting}
        counts["held"] = sum(entry.held for entry in self._entries.values())
        counts["decoding"] = self._decodes.pending()
        return counts | self._totals

    def check_integrity(self) -> None:
        """Scheduler and decode queue hold each request exactly once between them. Raises IntegrityError."""
        self._scheduler.check_integrity()
        scheduled, decoding = self._scheduler.ids(), self._decodes.ids()
        if scheduled & decoding or scheduled | decoding != self._entries.keys():
            raise IntegrityError(f"stage {self._name}: requests {sorted(self._entries)} do not match the queues")

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
        for entry in list(self._entries.values()):
            self._drop(entry)
        self._decodes.close()
        self._model.shutdown()

    # -- one tick

    def _advance(self, batch: list[Entry[S]], output: StepOutput) -> None:
        self._encode([entry for entry in batch if entry.phase is Phase.ENCODE], output)
        for entry in batch:
            if entry.phase is Phase.PREPARE and self._model.ready(entry.state):
                self._prepare(entry, output)
        self._denoise(self._within_rows([entry for entry in batch if entry.phase is Phase.DENOISE]), output)
        for entry in batch:
            self._refresh(entry)

    def _encode(self, entries: list[Entry[S]], output: StepOutput) -> None:
        if not entries:
            return
        start = self._clock()
        self._faults.hit("before_encode")
        self._model.encode([entry.state for entry in entries])
        seconds = self._clock() - start
        output.spans.append(_computed(Phase.ENCODE.value, start, seconds, entries))
        for entry in entries:
            entry.queue_s = start - (entry.ready_at if entry.ready_at is not None else start)
            entry.phase = Phase.PREPARE
            self._spent(entry, "encode_s", seconds)

    def _prepare(self, entry: Entry[S], output: StepOutput) -> None:
        start = self._clock()
        self._model.prepare(entry.state)
        seconds = self._clock() - start
        output.spans.append(_computed(Phase.PREPARE.value, start, seconds, [entry]))
        self._spent(entry, "prepare_s", seconds)
        entry.steps = self._model.remaining(entry.state)
        entry.phase = Phase.DENOISE
        self._scheduler.resize(entry.id, rows=self._model.rows(entry.state), steps=max(1, entry.steps))

    def _within_rows(self, entries: list[Entry[S]]) -> list[Entry[S]]:
        """Those that fit now that the rows of newcomers are known; requests without steps take no part."""
        chosen: list[Entry[S]] = []
        rows = 0
        for entry in entries:
            size = self._model.rows(entry.state)
            fits = not chosen or rows + size <= self._scheduler.limits.max_rows
            if fits and self._model.remaining(entry.state) > 0:
                chosen.append(entry)
                rows += size
        return chosen

    def _denoise(self, entries: list[Entry[S]], output: StepOutput) -> None:
        if not entries:
            return
        rows = sum(self._model.rows(entry.state) for entry in entries)
        start = self._clock()
        self._faults.hit("before_denoise")
        self._model.denoise([entry.state for entry in entries])
        self._faults.hit("after_denoise")
        seconds = self._clock() - start
        output.spans.append(_computed(Phase.DENOISE.value, start, seconds, entries))
        self._scheduler.curve.observe(rows, seconds)
        self._scheduler.served([entry.id for entry in entries])
        for name, count in (("ticks", 1), ("transformer_calls", 1), ("batch_rows", rows)):
            self._totals[name] += count
        for name in ("steps", "batch_requests"):
            self._totals[name] += len(entries)
        for entry in entries:
            self._spent(entry, "denoise_s", seconds)
            self._stepped(entry, output)

    def _stepped(self, entry: Entry[S], output: StepOutput) -> None:
        entry.steps_done += 1
        if entry.held:
            return
        if PROGRESS_PORT in entry.open_ports:
            meta = {"step": entry.steps_done, "steps": entry.steps}
            output.emissions.append(_emission(entry, PROGRESS_PORT, MultimodalPayload(meta=meta)))
        if PARTIAL_PORT in entry.open_ports:
            preview = self._model.preview(entry.state)
            if preview is not None:
                self._decodes.preview(entry, preview)

    def _refresh(self, entry: Entry[S]) -> None:
        """Tells the scheduler whether the request can use a turn, or moves it on to the decode queue."""
        if entry.phase is Phase.DECODE:
            return
        if entry.phase is Phase.DENOISE and self._model.remaining(entry.state) == 0:
            entry.phase = Phase.DECODE
            self._scheduler.remove(entry.id)
            self._faults.hit("before_picture")
            self._decodes.add(entry)
            return
        ready = self._model.ready(entry.state)
        if ready and entry.ready_at is None:
            entry.ready_at = self._clock()
        self._scheduler.set_runnable(entry.id, ready)

    # -- what the decode thread brought

    def _emit_decoded(self, result: DecodeResult[S], output: StepOutput) -> None:
        entry = result.entry
        self._faults.hit("after_picture")
        self._spent(entry, "decode_s", result.seconds)
        phase = "preview" if result.is_preview else Phase.DECODE.value
        output.spans.append(_computed(phase, result.start_s, result.seconds, [entry]))
        output.emissions += [_emission(entry, chunk.port, chunk.payload, chunk.final) for chunk in result.produced]
        if result.is_preview or not self._model.done(entry.state):
            return
        for port in sorted(entry.open_ports):
            output.emissions.append(_emission(entry, port, MultimodalPayload(), True))
        metrics = self._metrics(entry)
        self._drop(entry)
        self._totals["finished"] += 1
        output.finished.append(Finished(request_id=entry.id, reason=FinishReason.STOP, metrics=metrics))

    def _metrics(self, entry: Entry[S]) -> StageMetrics:
        """Phase times in seconds; `ticks`: transformer calls of the engine while the request was in the stage."""
        extra = entry.seconds | {
            "steps": float(entry.steps_done),
            "transformer_calls": float(entry.steps_done),
            "ticks": self._totals["ticks"] - entry.ticks_at_start,
        }
        return StageMetrics(
            queue_s=entry.queue_s,
            compute_s=sum(entry.seconds.values()),
            steps=entry.steps_done,
            chunks_out=entry.chunks_out,
            extra=extra | self._model.metrics(entry.state),
        )

    def _spent(self, entry: Entry[S], phase: str, seconds: float) -> None:
        entry.seconds[phase] += seconds
        self._totals[phase] = self._totals.get(phase, 0.0) + seconds

    def _drop(self, entry: Entry[S]) -> None:
        """Forgets the request; its state is closed as soon as the decode thread is through with it."""
        del self._entries[entry.id]
        self._scheduler.remove(entry.id)
        for name, value in self._model.metrics(entry.state).items():
            self._totals[name] = self._totals.get(name, 0.0) + value
        self._decodes.drop(entry)


def step_limits(config: StageConfig, capabilities: Capabilities) -> StepLimits:
    """The scheduler's limits. Raises ConfigError when the configuration asks for what the model cannot do."""
    batching: Batching = "request" if config.options.get("batching") == "request" else "step"
    if config.max_num_seqs > 1 and batching not in capabilities.batching:
        can = ", ".join(sorted(capabilities.batching))
        fix = f"set batching to {can}" if can else "set max_num_seqs to 1"
        raise ConfigError(
            f"stages.{config.name}: this model has no {batching} batching; {fix}",
            param=f"stages.{config.name}.batching",
        )
    stretch = math.inf if config.objective == "throughput" else _LATENCY_STRETCH
    return StepLimits(
        max_requests=config.max_num_seqs, max_rows=config.token_budget, batching=batching, stretch=stretch
    )


def _emission(entry: Entry[S], port: str, payload: MultimodalPayload, final: bool = False) -> Emission:
    entry.chunks_out += 1
    if final:
        entry.open_ports.discard(port)
    return Emission(request_id=entry.id, port=port, payload=payload, final=final)


def _computed(phase: str, start_s: float, seconds: float, entries: list[Entry[S]]) -> Computed:
    return Computed(phase, start_s, start_s + seconds, tuple([entry.id for entry in entries]))
