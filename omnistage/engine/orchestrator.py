"""Orchestrator: takes each request through its stages: routing, ordering, credit, deadlines, cancellation, replay.

It sees every chunk's header and never a payload byte, except those on their way to the client. All methods run in one
event loop; nothing here waits.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from omnistage.config.model import CLIENT, EdgeSpec, OmniConfig, PipelineConfig, RequestPlan
from omnistage.engine.delivery import client_output, without_sent
from omnistage.engine.metrics import EngineMetrics
from omnistage.engine.poison import PoisonBook, Quarantine
from omnistage.engine.record import ClientEvent, Outstanding, RequestRecord, StageVisit, active_edges, take_down
from omnistage.engine.router import Router
from omnistage.engine.text_demands import tools_of
from omnistage.engine.watch import HandoffWatch
from omnistage.errors import ErrorCode, ErrorInfo, RequestError
from omnistage.messages import Abort, Chunk, ChunkKey, Extent, FromStage, Visit, VisitEnd
from omnistage.request import FinishReason, OmniRequestOutput
from omnistage.runtime.plan import ReplicaId, variant_of
from omnistage.runtime.stage_runtime import CLIENT_REPLICA, Replica, StageRuntime
from omnistage.sampling import SamplingParams, sampling_params
from omnistage.stages.base import StageRequest

logger = logging.getLogger(__name__)

MAX_REPLAYS = 2
PROGRESS = "progress"


class Orchestrator:
    """See the module docstring. `attach` gives it the runtime whose replicas it drives. `records` are live requests by
    id, those that wait for abort acknowledgements included."""

    def __init__(self, config: OmniConfig, pipeline: PipelineConfig, metrics: EngineMetrics) -> None:
        self._config = config
        self._pipeline = pipeline
        self._variant = variant_of(config, pipeline)
        self._metrics = metrics
        self.records: dict[str, RequestRecord] = {}
        self._outstanding: dict[ChunkKey, Outstanding] = {}
        self._router = Router(config)
        self._runtime: StageRuntime | None = None
        self._watch = HandoffWatch(config, self._ask, self._worked_s, self.fail)
        self._quarantine = Quarantine()
        self.poison = PoisonBook()
        self._on_gone: list[asyncio.Future[None]] = []

    def attach(self, runtime: StageRuntime) -> None:
        self._runtime = runtime

    @property
    def runtime(self) -> StageRuntime:
        assert self._runtime is not None, "attach() comes first"
        return self._runtime

    @property
    def outstanding_chunks(self) -> int:
        return len(self._outstanding)

    def needs(self, stages: list[str]) -> bool:
        """True while a live request visits one of the stages."""
        return any(stage in record.plan.stages for record in self.records.values() for stage in stages)

    def handles(self, replicas: frozenset[ReplicaId]) -> bool:
        """True while a chunk that one of the replicas stores is outstanding."""
        return any(entry.producer in replicas for entry in self._outstanding.values())

    def _ask(self, replica: ReplicaId, visit: Visit) -> None:
        self.runtime.replicas[replica].outbox().probes.append(visit)

    def _worked_s(self, replica: ReplicaId) -> float:
        return self.runtime.worked_s(self.runtime.replicas[replica])

    # -- a request begins

    def active_edges(self, plan: RequestPlan, progress: bool = False) -> tuple[EdgeSpec, ...]:
        """The edges of the graph that carry something in this request, those of "progress" included if wanted."""
        return active_edges(self._variant.edges, plan, frozenset({PROGRESS} if progress else ()))

    def check_runnable(self, plan: RequestPlan) -> None:
        """Raises RequestError (503) naming the first stage of the plan that no replica is up or expected back for."""
        for stage in plan.stages:
            if not any(replica.expected for replica in self.runtime.of_stage(stage)):
                text = f"stage {stage} is not ready"
                raise RequestError(text, code=ErrorCode.UNAVAILABLE, stage=stage, retry_after_s=1.0)

    def sampling_for(self, record: RequestRecord, stage: str) -> SamplingParams:
        settings = self._config.stages[stage]
        planned = record.plan.params.get(stage, {}).get("sampling", {})
        asked = record.request.sampling
        for_text = asked.get("", {}) if stage == record.text_stage else {}
        return sampling_params(stage, settings.sampling, planned, for_text, asked.get(stage, {}))

    def begin(self, record: RequestRecord) -> None:
        """Starts an admitted request. Raises RequestError for bad sampling parameters."""
        for stage in record.plan.stages:
            self.sampling_for(record, stage)
        self.records[record.id] = record
        record.progress = self._now()
        self._arm(record)
        self._dispatch_all(record)

    def _dispatch_all(self, record: RequestRecord) -> None:
        fed = {edge.target_stage for edge in record.edges if edge.source_stage != CLIENT}
        for stage in record.plan.stages:
            if stage not in fed:
                self._visit(record, stage)
        for item in record.plan.inputs:
            key = ChunkKey(record.id, record.epoch, f"{CLIENT}.{item.port}", 0)
            chunk = self.runtime.client_hub.store(item.port, key, True, item.payload)
            self._route(record, CLIENT_REPLICA, chunk)

    def _arm(self, record: RequestRecord) -> None:
        loop = asyncio.get_running_loop()
        limit = record.request.timeout or self._config.limits.request_timeout_s
        record.timeout = loop.call_later(limit, self._timed_out, record, limit)
        self._watch.follow(record)

    def _timed_out(self, record: RequestRecord, limit: float) -> None:
        where = ", ".join(stage for stage, visit in record.visits.items() if visit.state != "ended")
        self.fail(record, ErrorInfo(ErrorCode.DEADLINE, f"not finished within {limit:g} s (at: {where})"))

    # -- stages and chunks

    def _visit(self, record: RequestRecord, stage: str) -> StageVisit:
        visit = record.visits.get(stage)
        if visit is None:
            replica = self._router.pick(record, self.runtime.of_stage(stage))
            visit = record.visits[stage] = StageVisit(replica.id)
            if (replica.ready or self._may_finish(record, replica)) and self._quarantine.admits(stage, record.id):
                self._activate(record, stage, visit)
        return visit

    def _may_finish(self, record: RequestRecord, replica: Replica) -> bool:
        """A draining replica still takes what it waits for: requests that are in its process already, and, before it
        sleeps, all that were admitted."""
        homes = {
            self.runtime.replicas[visit.replica].host for visit in record.visits.values() if visit.state != "parked"
        }
        return replica.state == "draining" and (not replica.planned or replica.host in homes)

    def _activate(self, record: RequestRecord, stage: str, visit: StageVisit) -> None:
        replica = self.runtime.replicas[visit.replica]
        visit.state = "active"
        replica.load += 1
        replica.outbox().adds.append(
            StageRequest(
                request_id=record.id,
                epoch=record.epoch,
                inputs=tuple(edge.target_port for edge in record.edges if edge.target_stage == stage),
                outputs=tuple(dict.fromkeys(e.source_port for e in record.edges if e.source_stage == stage)),
                params=record.plan.params.get(stage, {}),
                sampling=self.sampling_for(record, stage),
                seed=record.seed,
                priority=record.request.priority,
                cache_salt=record.request.owner,
                tools=tools_of(record.request),
                traced=record.enter(stage),
            )
        )
        replica.outbox().chunks.extend(visit.waiting)
        visit.waiting = []

    def _route(self, record: RequestRecord, producer: ReplicaId, chunk: Chunk) -> None:
        """Hands a chunk to everyone who reads its port in this request."""
        source, key = chunk.key.source, chunk.key
        due = record.received[source]
        if key.seq != due:
            kind = "twice" if key.seq < due else "before its turn"
            self._release_lost(producer, key, range(due, key.seq + 1))
            text = f"chunk {key.seq} of {source} came {kind} ({due} was due)"
            self.fail(record, ErrorInfo(ErrorCode.HANDOFF, text, stage=producer.stage, edge=source))
            return
        record.received[source] = due + 1
        if chunk.final:
            record.closed.add(source)
        edges = record.edges_from(source)
        readers = [self._reader(record, edge) for edge in edges]
        self._outstanding[key] = Outstanding(chunk, producer, readers)
        record.keys.add(key)
        for edge in edges:
            self._send(record, edge, chunk)
        if not edges:
            self._consumed(CLIENT_REPLICA, key)

    def _reader(self, record: RequestRecord, edge: EdgeSpec) -> ReplicaId:
        if edge.target_stage == CLIENT:
            return CLIENT_REPLICA
        return self._visit(record, edge.target_stage).replica

    def _send(self, record: RequestRecord, edge: EdgeSpec, chunk: Chunk) -> None:
        if edge.target_stage == CLIENT:
            self._to_client(record, edge, chunk)
            return
        settings = self._config.edges.get(edge.name)
        if settings is None or settings.async_chunk:
            self._to_stage(record, edge, chunk)
            return
        record.withheld[edge.source].append(chunk)
        if chunk.final:
            for held in record.withheld.pop(edge.source):
                self._to_stage(record, edge, held)

    def _to_stage(self, record: RequestRecord, edge: EdgeSpec, chunk: Chunk) -> None:
        visit = self._visit(record, edge.target_stage)
        visit.delivered[edge.target_port] += 1
        chunk = Chunk(
            chunk.key, chunk.replica, chunk.final, chunk.header, chunk.nbytes, chunk.body, chunk.offset, chunk.local,
            edge.target_port, chunk.sent_s,
        )  # fmt: skip
        if visit.state == "parked":
            visit.waiting.append(chunk)
        elif visit.state == "active":
            self.runtime.replicas[visit.replica].outbox().chunks.append(chunk)
        else:
            self._consumed(visit.replica, chunk.key)  # the stage ended without needing it

    def _to_client(self, record: RequestRecord, edge: EdgeSpec, chunk: Chunk) -> None:
        output = client_output(self.runtime.client_hub, edge, chunk)
        skip = record.skip.get(edge.source)
        kept = output if skip is None else without_sent(output, skip)
        if kept is None:
            self._consumed(CLIENT_REPLICA, chunk.key)
            return
        record.push(ClientEvent(kept, chunk.key, edge.source, record.epoch, chunk.sent_s))

    # -- messages of replicas (RuntimeListener)

    def on_message(self, replica: Replica, message: FromStage) -> None:
        now = self._now()
        take_down(self.records, replica.id.stage, message, now)
        for key in message.consumed:
            self._consumed(replica.id, key)
        for chunk in message.chunks:
            self._on_chunk(replica, chunk, now)
        for end in message.finished:
            self._on_finished(replica, end)
        for visit in message.aborted:
            self._sweep(replica.id, visit)
            self._acknowledge(replica, visit)
        for probe in message.probes:
            record = self._current(probe.request_id, probe.epoch)
            if record is not None:
                self._watch.on_probe(record, replica, probe)
        self._metrics.observe_stage(replica, message)

    def _on_chunk(self, replica: Replica, chunk: Chunk, now: float) -> None:
        record = self._current(chunk.key.request_id, chunk.key.epoch)
        if record is None:
            self._release(replica.id, chunk.key)
            return
        record.progress = now
        self._route(record, replica.id, chunk)

    def _current(self, request_id: str, epoch: int) -> RequestRecord | None:
        record = self.records.get(request_id)
        return record if record is not None and record.epoch == epoch and not record.ending else None

    def _consumed(self, reader: ReplicaId, key: ChunkKey) -> None:
        entry = self._outstanding.get(key)
        if entry is None or (reader not in entry.readers and entry.readers):
            return
        if entry.readers:
            entry.readers.remove(reader)
        if not entry.readers:
            self._discard(key)

    def _sweep(self, reader: ReplicaId, visit: Visit) -> None:
        """A reader holds nothing of a request any more: whatever it was sent counts as consumed."""
        record = self.records.get(visit.request_id)
        for key in list(record.keys) if record is not None else ():
            if key.epoch == visit.epoch and reader in self._outstanding[key].readers:
                self._consumed(reader, key)

    def _release(self, producer: ReplicaId, key: ChunkKey) -> None:
        if producer == CLIENT_REPLICA:
            self.runtime.client_hub.release(key)
        else:
            self.runtime.replicas[producer].outbox().released.append(key)

    def _on_finished(self, replica: Replica, end: VisitEnd) -> None:
        self._sweep(replica.id, Visit(end.request_id, end.epoch))
        record = self._current(end.request_id, end.epoch)
        if record is None:
            self._acknowledge(replica, Visit(end.request_id, end.epoch))
            return
        replica.load -= 1
        stage = replica.id.stage
        record.visits[stage].state = "ended"
        self._leave_quarantine(record, stage)
        record.metrics[stage] = end.metrics
        record.reasons[stage] = end.reason
        if end.error is not None:
            self.fail(record, end.error)
            return
        self._check_sent(record, replica.id, end)
        self._maybe_complete(record)

    def _release_lost(self, producer: ReplicaId, key: ChunkKey, seqs: range) -> None:
        """Frees what the producer stores of chunks that never came or came out of turn."""
        for seq in seqs:
            self._release(producer, ChunkKey(key.request_id, key.epoch, key.source, seq))

    def _check_sent(self, record: RequestRecord, replica: ReplicaId, end: VisitEnd) -> None:
        stage = replica.stage
        for source in dict.fromkeys(edge.source for edge in record.edges if edge.source_stage == stage):
            sent, came = end.sent.get(source.partition(".")[2], 0), record.received[source]
            if sent != came:
                self._release_lost(replica, ChunkKey(record.id, record.epoch, source, 0), range(came, sent))
                text = f"chunk {came} of {source} was lost ({sent} were sent)"
            elif source not in record.closed:
                text = f"{source} was never closed"
            else:
                continue
            self.fail(record, ErrorInfo(ErrorCode.HANDOFF, text, stage=stage, edge=source))
            return

    def _maybe_complete(self, record: RequestRecord) -> None:
        done = all(stage in record.visits and record.visits[stage].state == "ended" for stage in record.plan.stages)
        if done and not record.ending:
            self._terminate(record, record.finish_reason(), None)

    # -- a request ends

    def fail(self, record: RequestRecord, info: ErrorInfo) -> None:
        """Ends a request with an error: what was already produced still reaches the client first."""
        if not record.ending:
            self._terminate(record, FinishReason.ERROR, info)

    def abort(self, request_id: str) -> bool:
        record = self.records.get(request_id)
        if record is None or record.ending:
            return False
        self._terminate(record, FinishReason.ABORT, None)
        return True

    def _terminate(self, record: RequestRecord, reason: FinishReason, error: ErrorInfo | None) -> None:
        record.ending = True
        record.error = error
        record.cancel_timers()
        record.timing.ended = self._now()
        self._abort_visits(record)
        for chunks in record.withheld.values():
            for chunk in chunks:
                self._discard(chunk.key)
        record.withheld.clear()
        final = OmniRequestOutput(
            request_id=record.id,
            finished=True,
            finish_reason=reason,
            seed=record.seed,
            metrics=self._metrics.request_metrics(record),
            error=error,
        )
        record.push(ClientEvent(final))
        self._metrics.count_request(record, reason)
        self._maybe_forget(record)

    def _abort_visits(self, record: RequestRecord) -> None:
        for stage, visit in record.visits.items():
            for chunk in visit.waiting:
                self._discard(chunk.key)
            visit.waiting.clear()
            if visit.state == "active":
                record.acks.add((visit.replica, record.epoch))
                abort = Abort(record.id, record.epoch, record.came_from(stage))
                self.runtime.replicas[visit.replica].outbox().aborts.append(abort)
            visit.state = "ended"

    def _discard(self, key: ChunkKey) -> None:
        """Forgets a chunk that nobody reads any more and frees what its producer stores."""
        entry = self._outstanding.pop(key, None)
        if entry is None:
            return
        record = self.records.get(key.request_id)
        if record is not None:
            record.keys.discard(key)
        self._release(entry.producer, key)

    def _acknowledge(self, replica: Replica, visit: Visit) -> None:
        record = self.records.get(visit.request_id)
        if record is None or (replica.id, visit.epoch) not in record.acks:
            return
        record.acks.discard((replica.id, visit.epoch))
        replica.load -= 1
        self._maybe_forget(record)

    def _leave_quarantine(self, record: RequestRecord, stage: str) -> None:
        if self._quarantine.ended(stage, record.id):
            for replica in self.runtime.of_stage(stage):
                if replica.ready:
                    self.on_ready(replica)

    def _maybe_forget(self, record: RequestRecord) -> None:
        if record.ending and not record.acks:
            for stage in record.plan.stages:
                self._leave_quarantine(record, stage)
            self.records.pop(record.id, None)
            for waiter in self._on_gone:
                if not waiter.done():
                    waiter.set_result(None)
            self._on_gone.clear()

    async def until_change(self) -> None:
        """Returns when the next record is forgotten."""
        waiter = asyncio.get_running_loop().create_future()
        self._on_gone.append(waiter)
        await waiter

    # -- the client's side

    def taken(self, record: RequestRecord, event: ClientEvent) -> None:
        """The client has an event: notes what it has seen and gives the producer its credit back."""
        self._metrics.observe_delivery(record, event.output, self._now())
        if event.key is None:
            return
        if record.timeline is not None:
            record.timeline.delivered(event.source, event.sent_s)
        if record.request.stream:
            self._note_sent(record, event)
        self._consumed(CLIENT_REPLICA, event.key)

    def _note_sent(self, record: RequestRecord, event: ClientEvent) -> None:
        record.delivered_stages.add(event.output.stage)
        sent = record.sent[event.source]
        sent.chunks += 1
        sent.text += event.output.text
        sent.tokens += len(event.output.token_ids)
        if event.output.payload is not None and "audio" in event.output.payload.tensors:
            sent.samples += event.output.payload["audio"].shape[-1]

    def drop_events(self, record: RequestRecord) -> None:
        """The client will not take what is still queued."""
        for event in record.events:
            if event.key is not None:
                self._consumed(CLIENT_REPLICA, event.key)
        record.events.clear()

    # -- replicas that come and go (RuntimeListener)

    def extents_of(self, replica: ReplicaId) -> list[Extent]:
        return [
            Extent(key, entry.chunk.offset, entry.chunk.nbytes)
            for key, entry in self._outstanding.items()
            if entry.producer == replica and entry.chunk.offset >= 0
        ]

    def on_ready(self, replica: Replica) -> None:
        for record in list(self.records.values()):
            for stage, visit in record.visits.items():
                parked = visit.replica == replica.id and visit.state == "parked" and not record.ending
                if parked and self._quarantine.admits(stage, record.id):
                    self._activate(record, stage, visit)

    def on_down(self, replica: Replica, cause: str) -> None:
        for key, entry in list(self._outstanding.items()):
            if replica.id in entry.readers:
                self._consumed(replica.id, key)
        for record in list(self.records.values()):
            for ack in [ack for ack in record.acks if ack[0] == replica.id]:
                record.acks.discard(ack)
            visit = record.visits.get(replica.id.stage)
            if not record.ending and visit is not None and visit.replica == replica.id and visit.state != "ended":
                self._replay_or_fail(record, replica, cause)
            self._maybe_forget(record)

    def _replay_or_fail(self, record: RequestRecord, replica: Replica, cause: str) -> None:
        """Runs a request again from its inputs unless the client has bytes that derive from the dead stage."""
        stage = replica.id.stage
        parked = record.visits[stage].state == "parked"
        if parked and replica.expected:
            return
        record.visits[stage].state = "ended"
        if not replica.expected or record.epoch >= MAX_REPLAYS or record.delivered_stages & record.descendants(stage):
            if not parked and self._quarantine.alone(stage, record.id):
                self.poison.note(record.request, record.media, stage)
            self.fail(record, ErrorInfo(ErrorCode.STAGE_DIED, f"stage {stage} died ({cause})", stage=stage))
            return
        if record.epoch == MAX_REPLAYS - 1:
            self._quarantine.suspect(stage, record.id)
        logger.warning("request %s is replayed: stage %s died", record.id, stage)
        self._abort_visits(record)
        self.drop_events(record)
        record.epoch += 1
        record.timing.restart(keep=record.request.stream)
        record.skip = {source: replace(sent) for source, sent in record.sent.items()}
        for books in (record.visits, record.received, record.closed, record.withheld):
            books.clear()
        self._dispatch_all(record)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
