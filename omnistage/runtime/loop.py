"""The loop of one stage replica: messages in, engine steps, messages out. One thread owns all of it.

It waits on its socket (or on the engine's wake-up) only when the engine has nothing to do, and it is the one place
where an exception of a stage becomes an error of a request.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from omnistage.connectors.hub import ConnectorHub
from omnistage.errors import ErrorCode, ErrorInfo, OmniError
from omnistage.faults import Faults
from omnistage.messages import (
    Abort,
    Chunk,
    ChunkKey,
    FrameBuffer,
    FromStage,
    Probe,
    ToStage,
    Visit,
    VisitEnd,
    frame,
)
from omnistage.request import FinishReason, StageMetrics
from omnistage.spans import SpanBook, VisitLog
from omnistage.stages.base import Emission, Finished, InputChunk, StageEngine, StageRequest, StepOutput

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 18
COUNTERS_INTERVAL_S = 0.2
UNLIMITED = 1 << 30
_NOTHING = FromStage()
HANDOFFS_KEPT = 1024


class Waker:
    """Wakes a loop from any thread; reading drains it."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    def wake(self) -> None:
        try:
            self._write.send(b"\0")
        except BlockingIOError:
            return  # enough wake-ups are pending already

    def drain(self) -> None:
        try:
            self._read.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        self._read.close()
        self._write.close()


@dataclass
class VisitState:
    """Books of one request at this replica. Ports map to chunk counts; `unreleased` counts per output port."""

    epoch: int
    received: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    sent: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    unreleased: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    held: bool = False
    handoff_s: float = 0.0
    work_s: float = 0.0
    book: SpanBook | None = None


class StageLoop:
    """Runs `engine` for one replica. `credits` maps output ports to the chunks that may be in flight per request.

    `span_limit` bounds the spans that are taken down of a visit, per kind and name; 0 for none at all.
    `run` is all of a replica's life; a driver that keeps time itself calls `begin`, `turn` and `end` instead.
    """

    def __init__(
        self,
        stage: str,
        engine: StageEngine,
        sock: socket.socket,
        hub: ConnectorHub,
        *,
        waker: Waker,
        credits: dict[str, int],
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.span_limit = 0
        self._clock = clock
        self._stage = stage
        self._engine = engine
        self._socket = sock
        self._hub = hub
        self._waker = waker
        self._credits = credits
        self._faults = faults or Faults()
        self._visits: dict[str, VisitState] = {}
        self._out = FromStage()
        self._frames = FrameBuffer()
        self._decode = msgspec.msgpack.Decoder(ToStage).decode
        self.stopping = False
        self._counters: dict[str, float] = {}
        self._counters_at = 0.0
        self._moved = False
        self._handoffs: deque[float] = deque(maxlen=HANDOFFS_KEPT)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(waker, selectors.EVENT_READ)

    def run(self) -> None:
        """Reports that it is ready, then serves until the socket closes or a shutdown message comes."""
        self.begin()
        try:
            while not self.stopping:
                self.turn()
            self._flush(idle=True)
        except (BrokenPipeError, ConnectionResetError):
            logger.info("stage %s: the orchestrator is gone", self._stage)
        finally:
            self.end()

    def begin(self) -> None:
        """The next turn reports that the replica is ready."""
        self._out.ready = True

    def end(self) -> None:
        """Releases everything; nothing more is sent."""
        self._engine.close()
        self._selector.close()

    @property
    def pending(self) -> bool:
        """True when another turn would step or send something, whether or not a message comes."""
        return self._engine.has_work() or self._out != _NOTHING or (self._moved and not self._visits)

    def turn(self, *, block: bool = True) -> None:
        """Sends what the last turn brought, takes messages (waiting for one if there is nothing to do and `block`),
        steps once."""
        busy = self._engine.has_work()
        if not busy:
            self._faults.hit("going_idle")
            self._check_idle()
        self._flush(idle=not busy)
        self._receive(block=block and not busy)
        if self._engine.has_work():
            self._step()

    # -- messages in

    def _receive(self, *, block: bool) -> None:
        waiting = COUNTERS_INTERVAL_S if self._moved else None  # an idle loop still owes its last counters
        for key, _ in self._selector.select(waiting if block else 0):
            if key.fileobj is self._waker:
                self._waker.drain()
                continue
            data = self._socket.recv(RECEIVE_BYTES)
            if not data:
                self.stopping = True
            for raw in self._frames.push(data):
                self._apply(self._decode(raw))

    def _apply(self, message: ToStage) -> None:
        self._moved = True
        self._faults.hit("message_received")
        for abort in message.aborts:
            self._abort(abort)
        for key in message.released:
            self._released(key)
        for request in message.adds:
            ends = any((a.request_id, a.epoch) == (request.request_id, request.epoch) for a in message.aborts)
            if not ends:  # in the turn that it began
                self._add(request)
        for chunk in message.chunks:
            self._deliver(chunk)
        for probe in message.probes:
            self._probe(probe)
        if message.shutdown:
            self._faults.hit("shutdown_received")
            self.stopping = True

    def _abort(self, abort: Abort) -> None:
        request_id, epoch = abort.request_id, abort.epoch
        self._faults.hit("before_abort", request_id)
        state = self._visits.get(request_id)
        if state is not None and state.epoch == epoch:
            self._drop(request_id)
            for port, sent in state.sent.items():
                for seq in range(abort.came.get(port, 0), sent):
                    self._hub.release(ChunkKey(request_id, epoch, f"{self._stage}.{port}", seq))
        self._out.aborted.append(Visit(request_id, epoch))
        self._faults.hit("after_abort", request_id)

    def _drop(self, request_id: str) -> None:
        self._engine.abort(request_id)
        state = self._visits.pop(request_id, None)
        if state is not None:
            self._send_log(request_id, state)

    def _send_log(self, request_id: str, state: VisitState) -> None:
        if state.book is not None:
            self._out.logs.append(VisitLog(request_id, state.book.blocks()))

    def _released(self, key: ChunkKey) -> None:
        self._faults.hit("before_release", key.request_id)
        self._hub.release(key)
        state = self._visits.get(key.request_id)
        if state is None or state.epoch != key.epoch:
            return
        state.unreleased[key.source.partition(".")[2]] -= 1
        self._update_hold(key.request_id, state)

    def _add(self, request: StageRequest) -> None:
        book = SpanBook(self.span_limit) if self.span_limit and request.traced else None
        self._visits[request.request_id] = VisitState(request.epoch, book=book)

        def add() -> None:
            self._faults.hit("before_add", request.request_id)
            self._engine.add(request)
            self._faults.hit("after_add", request.request_id)

        self._guard(request.request_id, add)

    def _deliver(self, chunk: Chunk) -> None:
        key = chunk.key
        action = self._faults.hit("chunk_received", key.request_id)
        for _ in range({"drop": 0, "duplicate": 2}.get(action or "", 1)):
            state = self._visits.get(key.request_id)
            if state is None or state.epoch != key.epoch:
                self._out.consumed.append(key)
                continue
            self._feed(chunk, state)

    def _feed(self, chunk: Chunk, state: VisitState) -> None:
        key, expected = chunk.key, state.received[chunk.port]
        if key.seq != expected:
            self._out.consumed.append(key)
            text = f"chunk {key.seq} of {key.source} came where {expected} was due"
            self._fail(key.request_id, ErrorInfo(ErrorCode.HANDOFF, text, stage=self._stage, edge=key.source))
            return
        state.received[chunk.port] += 1
        came_s = time.monotonic()
        state.handoff_s += came_s - chunk.sent_s
        self._handoffs.append(came_s - chunk.sent_s)
        if state.book is not None:
            state.book.add("handoff", key.source, chunk.sent_s, came_s)

        def feed() -> None:
            self._faults.hit("before_feed", key.request_id)
            self._faults.hit("before_load", key.request_id)
            payload = self._hub.load(chunk, lambda: self._out.consumed.append(key))
            self._faults.hit("after_load", key.request_id)
            self._engine.feed(
                InputChunk(request_id=key.request_id, port=chunk.port, seq=key.seq, final=chunk.final, payload=payload)
            )
            self._faults.hit("after_feed", key.request_id)

        self._guard(key.request_id, feed)

    def _probe(self, probe: Visit) -> None:
        self._faults.hit("probe_received", probe.request_id)
        state = self._visits.get(probe.request_id)
        known = state is not None and state.epoch == probe.epoch
        received = dict(state.received) if state is not None and known else {}
        sent = dict(state.sent) if state is not None and known else {}
        self._out.probes.append(Probe(probe.request_id, probe.epoch, known, received, sent))

    # -- the engine

    def _step(self) -> None:
        started = self._clock()
        try:
            self._faults.hit("before_step")
            output = self._engine.step()
            self._share(output, self._clock() - started)
        except Exception:
            logger.exception("stage %s: a step failed; stepping its requests one by one", self._stage)
            self._isolate()
            return
        self._collect(output)
        self._faults.hit("after_step")

    def _share(self, output: StepOutput, seconds: float) -> None:
        """Charges the requests of a step with their part of its time."""
        rows = output.rows or (1,) * len(output.batch)
        whole = sum(rows)
        for request_id, part in zip(output.batch, rows, strict=True):
            state = self._visits.get(request_id)
            if state is not None:
                state.work_s += seconds * part / whole

    def _isolate(self) -> None:
        def step_alone(request_id: str) -> None:
            self._collect(self._engine.step(frozenset((request_id,))))

        for request_id in sorted(self._engine.request_ids()):
            self._guard(request_id, partial(step_alone, request_id))

    def _guard(self, request_id: str, action: Callable[[], None]) -> None:
        """Runs what belongs to one request; an exception ends that request and nothing else."""
        try:
            action()
        except OmniError as error:
            info = error.info if error.info.stage else msgspec.structs.replace(error.info, stage=self._stage)
            self._fail(request_id, info)
        except Exception as error:
            logger.exception("stage %s: request failed", self._stage)
            text = f"stage {self._stage} failed on this request ({type(error).__name__})"
            self._fail(request_id, ErrorInfo(ErrorCode.STAGE_FAILED, text, stage=self._stage))

    def _fail(self, request_id: str, info: ErrorInfo) -> None:
        state = self._visits.get(request_id)
        if state is None:
            return
        self._drop(request_id)
        end = VisitEnd(request_id, state.epoch, FinishReason.ERROR, StageMetrics(), dict(state.sent), info)
        self._out.finished.append(end)

    def _collect(self, output: StepOutput) -> None:
        self._out.batch.extend(output.batch)
        if self.span_limit:
            self._take_down(output)
        for emission in output.emissions:
            self._emit(emission)
        for finished in output.finished:
            self._finish(finished)

    def _take_down(self, output: StepOutput) -> None:
        for span in output.spans:
            for request_id in span.requests or output.batch:
                state = self._visits.get(request_id)
                if state is not None and state.book is not None:
                    state.book.add("compute", span.phase, span.start_s, span.end_s)

    def _emit(self, emission: Emission) -> None:
        state = self._visits[emission.request_id]
        seq = state.sent[emission.port]
        state.sent[emission.port] = seq + 1
        key = ChunkKey(emission.request_id, state.epoch, f"{self._stage}.{emission.port}", seq)
        if emission.port not in self._credits:
            return  # nobody reads this port in any graph of the pipeline
        self._faults.hit("before_store", emission.request_id)
        chunk = self._hub.store(emission.port, key, emission.final, emission.payload)
        action = self._faults.hit("after_store", emission.request_id)
        if seq == 0:
            self._faults.hit("first_stored", emission.request_id)
        if emission.final:
            self._faults.hit("last_stored", emission.request_id)
        state.unreleased[emission.port] += 1
        self._out.chunks.extend([chunk] * {"drop": 0, "duplicate": 2}.get(action or "", 1))
        self._update_hold(emission.request_id, state)

    def _update_hold(self, request_id: str, state: VisitState) -> None:
        held = any(count >= self._credits.get(port, UNLIMITED) for port, count in state.unreleased.items())
        if held != state.held:
            state.held = held
            self._faults.hit("credit_lost" if held else "credit_back", request_id)
            self._engine.hold(request_id, held)

    def _finish(self, finished: Finished) -> None:
        self._faults.hit("before_finish", finished.request_id)
        state = self._visits.pop(finished.request_id)
        self._send_log(finished.request_id, state)
        finished.metrics.handoff_s, finished.metrics.work_s = state.handoff_s, state.work_s
        self._out.finished.append(
            VisitEnd(
                finished.request_id, state.epoch, finished.reason, finished.metrics, dict(state.sent), finished.error
            )
        )
        self._faults.hit("after_finish", finished.request_id)

    # -- messages out

    def _check_idle(self) -> None:
        if self._visits or self._engine.request_ids():
            return
        self._engine.check_integrity()
        self._hub.check_integrity()

    def _report_counters(self, now: float) -> None:
        counters = self._engine.counters() | self._hub.counters() | {"visits": float(len(self._visits))}
        counters |= _percentiles(self._handoffs)
        counters["open_work_s"] = sum(state.work_s for state in self._visits.values())
        self._moved, self._counters_at = False, now
        if counters != self._counters:
            self._counters = counters
            self._out.counters = counters

    def _flush(self, *, idle: bool) -> None:
        now = self._clock()
        out = self._out
        something = out != _NOTHING
        elapsed = now - self._counters_at > COUNTERS_INTERVAL_S
        if (idle and not self._visits) or ((idle or something) and elapsed):
            self._report_counters(now)
        if not something and not out.counters:
            return
        self._out = FromStage()
        self._faults.hit("before_send")
        raw = frame(out)
        half = len(raw) // 2 if self._faults.watches("mid_send") else 0
        self._socket.sendall(raw[:half])
        self._faults.hit("mid_send")
        self._socket.sendall(raw[half:])
        self._faults.hit("after_send")


def _percentiles(handoffs: deque[float]) -> dict[str, float]:
    """Seconds from a chunk's production to its arrival here, over the last `HANDOFFS_KEPT`."""
    ordered = sorted(handoffs)
    if not ordered:
        return {}
    return {"handoff_p50_s": ordered[len(ordered) // 2], "handoff_p99_s": ordered[int(len(ordered) * 0.99)]}


def report_fatal(sock: socket.socket, info: ErrorInfo) -> None:
    """Tells the orchestrator why this replica cannot run."""
    try:
        sock.sendall(frame(FromStage(fatal=info)))
    except OSError:
        logger.error("stage %s: %s", info.stage, info.message)
