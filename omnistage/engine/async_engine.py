"""AsyncOmniEngine: the composition root. Builds orchestrator and runtime for one resolved configuration."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator

import msgspec

from omnistage.config.model import OmniConfig, RequestPlan
from omnistage.config.registry import load_pipeline
from omnistage.engine.admission import Admission, Ticket
from omnistage.engine.client import Health, ReplicaHealth
from omnistage.engine.maintenance import Maintenance
from omnistage.engine.metrics import EngineMetrics
from omnistage.engine.orchestrator import Orchestrator
from omnistage.engine.poison import fingerprint
from omnistage.engine.record import ClientEvent, RequestRecord, Timing
from omnistage.engine.recorder import Recorder
from omnistage.engine.text_demands import check_text_demands, with_read_messages
from omnistage.engine.timeline import Timelines
from omnistage.engine.work import Ask, WorkModel
from omnistage.errors import ErrorCode, IntegrityError, OmniError, RequestError
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason, OmniRequest, OmniRequestOutput
from omnistage.runtime.host import HostFactory, LocalHost
from omnistage.runtime.stage_runtime import StageRuntime

SEED_BITS = 31


class AsyncOmniEngine:
    """An `EngineClient`. Lives in one event loop; use as an async context manager or call `start` and `stop`."""

    def __init__(self, config: OmniConfig, make_host: HostFactory = LocalHost) -> None:
        self._make_host = make_host
        self.config = config
        self.pipeline = load_pipeline(config.pipeline)
        self._metrics = EngineMetrics()
        self.timelines = Timelines(config.trace)
        self._admission = Admission(config.limits, WorkModel(config), _now, self._progress)
        self.orchestrator = Orchestrator(config, self.pipeline, self._metrics)
        self._runtime: StageRuntime | None = None
        self._maintenance: Maintenance | None = None
        self._draining = False
        self._recorder = Recorder(config) if config.record.folder else None

    @property
    def runtime(self) -> StageRuntime:
        if self._runtime is None:
            raise OmniError("the engine is not started", code=ErrorCode.UNAVAILABLE)
        return self._runtime

    async def start(self) -> None:
        """Starts all stages. Raises StageError naming the stage and the cause, RecordError for a record's folder."""
        if self._recorder is not None:
            self._recorder.open()
        self._runtime = StageRuntime(self.config, self.pipeline, self.orchestrator, self._make_host)
        self.orchestrator.attach(self._runtime)
        self._maintenance = Maintenance(self.config, self.orchestrator, self._runtime)
        self._metrics.watch(lambda: list(self.runtime.replicas.values()), self.gauges)
        await self._runtime.start()

    async def stop(self) -> None:
        """Ends everything now; live requests end with finish reason "abort"."""
        self._draining = True
        for request_id in list(self.orchestrator.records):
            self.orchestrator.abort(request_id)
        if self._runtime is not None:
            await self._runtime.stop()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)

    async def drain(self) -> None:
        """Admits nothing more and returns when live requests have ended, or after `limits.drain_timeout_s`."""
        self._draining = True
        try:
            async with asyncio.timeout(self.config.limits.drain_timeout_s):
                await self.idle()
        except TimeoutError:
            return

    async def idle(self) -> None:
        """Returns when no request is left, acknowledgements included."""
        while self.orchestrator.records:
            await self.orchestrator.until_change()

    async def __aenter__(self) -> AsyncOmniEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # -- requests

    async def generate(
        self, request: OmniRequest, media: dict[str, MultimodalPayload] | None = None
    ) -> AsyncIterator[OmniRequestOutput]:
        """See `EngineClient.generate`."""
        try:
            record, ticket = await self._admit(request, media or {})
        except OmniError as error:
            self._metrics.count_rejection(error.info.code)
            raise
        reason = FinishReason.ABORT
        try:
            async for output in self._events(record):
                reason = output.finish_reason or reason
                yield output
        finally:
            if self._recorder is not None:
                self._recorder.ended(record, reason)
            self.orchestrator.abort(record.id)
            self.orchestrator.drop_events(record)
            self.timelines.end(record.timeline)
            answered = record.error is None and record.metrics.keys() >= set(record.plan.stages)
            self._admission.leave(ticket, record.metrics if answered else {})

    async def _admit(self, request: OmniRequest, media: dict[str, MultimodalPayload]) -> tuple[RequestRecord, Ticket]:
        if self._runtime is None:
            raise RequestError("the server is starting", code=ErrorCode.UNAVAILABLE, retry_after_s=1.0)
        if self._draining:
            raise RequestError("the server is shutting down", code=ErrorCode.UNAVAILABLE, retry_after_s=1.0)
        arrived, arrived_s = asyncio.get_running_loop().time(), time.monotonic()
        if request.task not in self.pipeline.tasks:
            known = ", ".join(self.pipeline.tasks)
            raise RequestError(f"{self.pipeline.name} has no task {request.task!r}; it has {known}", param="task")
        self._check_stage_names(request)
        request = with_read_messages(request)
        plan = self.pipeline.plan(request, media, self.config)
        _check_plain(request, plan)
        await check_text_demands(request, plan, self.pipeline.variants[self.config.variant])
        self.orchestrator.poison.check(request, media)
        ask = Ask(request, plan, media, self.config)
        ticket = await self._admission.enter(ask, request.priority, lambda: _booking_key(request, media))
        try:
            if request.id in self.orchestrator.records:
                raise RequestError(f"a request with id {request.id!r} is running", param="id")
            self.orchestrator.check_runnable(plan)
            record = RequestRecord(
                request=request,
                plan=plan,
                media=media,
                edges=self.orchestrator.active_edges(plan, request.progress),
                seed=request.seed if request.seed is not None else secrets.randbits(SEED_BITS),
                timing=Timing(admitted=arrived),
                timeline=self.timelines.begin(request, arrived_s),
            )
            self.orchestrator.begin(record)
            if self._recorder is not None:
                self._recorder.began(record)
        except BaseException:
            self._admission.leave(ticket, {})
            raise
        return record, ticket

    def _check_stage_names(self, request: OmniRequest) -> None:
        unknown = [stage for stage in request.sampling if stage and stage not in self.config.stages]
        if unknown:
            known = ", ".join(self.config.stages)
            raise RequestError(f"sampling: no stage {unknown[0]!r}; stages are {known}", param=f"sampling.{unknown[0]}")

    async def _events(self, record: RequestRecord) -> AsyncIterator[OmniRequestOutput]:
        """Events in order, as they come or (without `stream`) all at the end; a replay takes back what was kept."""
        kept: list[ClientEvent] = []
        seqs: dict[str, int] = defaultdict(int)
        while True:
            event = await _next_event(record)
            self.orchestrator.taken(record, event)
            kept.append(event)
            if not (record.request.stream or event.output.finished):
                continue
            for ready in kept:
                if ready.output.finished or record.request.stream or ready.epoch == record.epoch:
                    yield self._numbered(record, ready, seqs)
            kept.clear()
            if event.output.finished:
                return

    def _numbered(self, record: RequestRecord, event: ClientEvent, seqs: dict[str, int]) -> OmniRequestOutput:
        """`seq` counts what the client gets, whatever a replay has cut."""
        if event.output.finished:
            record.timing.ended = asyncio.get_running_loop().time()
            metrics = self._metrics.request_metrics(record)
            if record.timeline is not None:
                record.timeline.metrics, record.timeline.finish_reason = metrics, event.output.finish_reason
            if event.output.error is None:
                self._metrics.observe_request(record.request.task, metrics)
            return msgspec.structs.replace(event.output, metrics=metrics)
        if self._recorder is not None:
            self._recorder.delivered(record, event)
        seqs[event.source] += 1
        return msgspec.structs.replace(event.output, seq=seqs[event.source] - 1)

    async def abort(self, request_id: str) -> bool:
        return self.orchestrator.abort(request_id)

    # -- commands (EngineControl)

    @property
    def maintenance(self) -> Maintenance:
        if self._maintenance is None:
            raise OmniError("the engine is not started", code=ErrorCode.UNAVAILABLE)
        return self._maintenance

    async def sleep(self, stage: str) -> list[str]:
        return await self.maintenance.sleep(stage)

    async def wake(self, stage: str) -> list[str]:
        return await self.maintenance.wake(stage)

    async def restart(self, stage: str) -> list[str]:
        return await self.maintenance.restart(stage)

    def set_draining(self, draining: bool) -> None:
        self._draining = draining

    # -- state

    def _progress(self) -> dict[str, float]:
        """Seconds that each stage, all its replicas together, has worked on the requests that are in."""
        done: dict[str, float] = defaultdict(float)
        for replica in self.runtime.replicas.values():
            done[replica.id.stage] += replica.counters.get("open_work_s", 0.0)
        for record in self.orchestrator.records.values():
            for stage, metrics in record.metrics.items():
                done[stage] += metrics.work_s
        return {stage: seconds / self.config.stages[stage].replicas for stage, seconds in done.items()}

    def gauges(self) -> dict[str, float]:
        return {
            "requests_running": float(self._admission.running),
            "requests_waiting": float(self._admission.waiting),
            "requests_booked": float(len(self._admission.bookings)),
            "backlog_seconds": self._admission.backlog_s(),
            "request_records": float(len(self.orchestrator.records)),
            "poisoned_inputs": float(len(self.orchestrator.poison)),
            "outstanding_chunks": float(self.orchestrator.outstanding_chunks),
        }

    def health(self) -> Health:
        replicas = list(self.runtime.replicas.values()) if self._runtime is not None else []
        by_stage = {stage: [r for r in replicas if r.id.stage == stage] for stage in self.config.stages}
        ready = all(any(replica.ready for replica in group) for group in by_stage.values())
        return Health(
            ready=ready and not self._draining,
            healthy=bool(replicas) and all(r.state in ("ready", "draining", "sleeping") or r.planned for r in replicas),
            draining=self._draining,
            replicas=[
                ReplicaHealth(
                    stage=replica.id.stage,
                    replica=replica.id.index,
                    state=replica.state,
                    pid=self.runtime.pid_of(replica),
                    restarts=replica.restarts,
                    detail=replica.detail,
                )
                for replica in replicas
            ],
        )

    def render_metrics(self) -> bytes:
        return self._metrics.render()

    def check_integrity(self) -> None:
        """Raises IntegrityError when an idle engine still holds something."""
        if self.orchestrator.records:
            return
        if self.orchestrator.outstanding_chunks:
            raise IntegrityError(f"{self.orchestrator.outstanding_chunks} chunks outstanding in an idle engine")
        self.runtime.client_hub.check_integrity()
        if self.runtime.client_hub.held():
            raise IntegrityError("the client's connector still stores payloads")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _booking_key(request: OmniRequest, media: dict[str, MultimodalPayload]) -> bytes:
    return request.owner.encode() + fingerprint(request, media)


def _check_plain(request: OmniRequest, plan: RequestPlan) -> None:
    """Raises RequestError for what no message between stages can carry: text with lone surrogates, numbers beyond 64
    bits, objects. Found here it is an error of this request; found later it would cost every request of a stage."""
    try:
        msgspec.msgpack.encode((request.id, request.owner, request.seed, request.priority, plan.params))
        for item in plan.inputs:
            msgspec.msgpack.encode(item.payload.header())
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise RequestError("the request has text or numbers that cannot be encoded", param="body") from None


async def _next_event(record: RequestRecord) -> ClientEvent:
    while not record.events:
        record.wake.clear()
        await record.wake.wait()
    return record.events.popleft()
