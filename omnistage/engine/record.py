"""The orchestrator's books of one request."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from omnistage.config.model import CLIENT, EdgeSpec, RequestPlan
from omnistage.engine.timeline import Timeline
from omnistage.errors import ErrorInfo
from omnistage.messages import Chunk, ChunkKey, FromStage
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason, OmniRequest, OmniRequestOutput, StageMetrics
from omnistage.runtime.plan import ReplicaId


def active_edges(
    edges: tuple[EdgeSpec, ...], plan: RequestPlan, extra: frozenset[str] = frozenset()
) -> tuple[EdgeSpec, ...]:
    """The edges of a graph that carry something in a request; `extra` are client ports wanted beyond the plan's."""
    stages, given = set(plan.stages), {item.port for item in plan.inputs}
    wanted = extra.union(plan.outputs)

    def active(edge: EdgeSpec) -> bool:
        source = edge.source_port in given if edge.source_stage == CLIENT else edge.source_stage in stages
        target = edge.target_port in wanted if edge.target_stage == CLIENT else edge.target_stage in stages
        return source and target

    return tuple(edge for edge in edges if active(edge))


@dataclass
class StageVisit:
    """A request at one stage: on which replica, in which state. `delivered` counts chunks per input source."""

    replica: ReplicaId
    state: Literal["parked", "active", "ended"] = "parked"
    delivered: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    waiting: list[Chunk] = field(default_factory=list)


@dataclass
class Outstanding:
    """A chunk that its producer still stores: `readers` must consume it first (the client is "client/0")."""

    chunk: Chunk
    producer: ReplicaId
    readers: list[ReplicaId]


@dataclass
class Sent:
    """What the client has of one output port: enough to go on after a replay without repeating it."""

    chunks: int = 0
    text: str = ""
    tokens: int = 0
    samples: int = 0


@dataclass
class ClientEvent:
    """An output on its way to the client; `key` is the chunk to acknowledge once it is taken, produced at `sent_s`."""

    output: OmniRequestOutput
    key: ChunkKey | None = None
    source: str = ""
    epoch: int = 0
    sent_s: float = 0.0


@dataclass
class Timing:
    """Monotonic seconds; None where it has not happened."""

    admitted: float
    first_text: float | None = None
    last_text: float | None = None
    first_media: float | None = None
    ended: float | None = None
    text_tokens: int = 0
    audio_samples: int = 0
    sample_rate: int = 0

    def restart(self, *, keep: bool) -> None:
        """Forgets deliveries that a replay repeats; those that a streaming client has are not repeated."""
        if not keep:
            self.first_text = self.last_text = self.first_media = None
            self.text_tokens = self.audio_samples = 0


@dataclass
class RequestRecord:
    """State of a request from admission to the last acknowledgement.

    States: running -> ending (terminal event given, aborts not yet acknowledged) -> gone. `epoch` counts replays;
    `acks` are the aborts that stages have not acknowledged yet.
    """

    request: OmniRequest
    plan: RequestPlan
    media: dict[str, MultimodalPayload]
    edges: tuple[EdgeSpec, ...]
    seed: int
    timing: Timing
    timeline: Timeline | None = None
    epoch: int = 0
    ending: bool = False
    visits: dict[str, StageVisit] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    closed: set[str] = field(default_factory=set)
    withheld: dict[str, list[Chunk]] = field(default_factory=lambda: defaultdict(list))
    keys: set[ChunkKey] = field(default_factory=set)
    acks: set[tuple[ReplicaId, int]] = field(default_factory=set)
    events: deque[ClientEvent] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    sent: dict[str, Sent] = field(default_factory=lambda: defaultdict(Sent))
    skip: dict[str, Sent] = field(default_factory=dict)
    delivered_stages: set[str] = field(default_factory=set)
    metrics: dict[str, StageMetrics] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    progress: float = 0.0
    asked: dict[str, float] = field(default_factory=dict)  # stages that owe the watch an answer: CPU seconds when asked
    timeout: asyncio.TimerHandle | None = None
    watch: asyncio.TimerHandle | None = None
    error: ErrorInfo | None = None

    @property
    def id(self) -> str:
        return self.request.id

    def enter(self, stage: str) -> bool:
        """The request is given to a stage; True when the stage is to take spans down."""
        if self.timeline is None:
            return False
        self.timeline.enter(stage)
        return self.timeline.detailed

    def edges_from(self, source: str) -> list[EdgeSpec]:
        return [edge for edge in self.edges if edge.source == source]

    def came_from(self, stage: str) -> dict[str, int]:
        """Chunks that have come in this epoch, by output port of a stage."""
        ports = {edge.source_port for edge in self.edges if edge.source_stage == stage}
        return {port: self.received[f"{stage}.{port}"] for port in ports}

    @property
    def text_stage(self) -> str:
        """The stage that parameters without a stage name are for: the first of the plan that gives the client text."""
        writers = {edge.source_stage for edge in self.edges if edge.target == f"{CLIENT}.text"}
        return next((stage for stage in self.plan.stages if stage in writers), "")

    def finish_reason(self) -> FinishReason:
        """Why the request ended, as the first stage that speaks to the client has it."""
        speaking = {edge.source_stage for edge in self.edges if edge.target_stage == CLIENT}
        first = next((stage for stage in self.plan.stages if stage in speaking), None)
        return self.reasons.get(first, FinishReason.STOP) if first is not None else FinishReason.STOP

    def push(self, event: ClientEvent) -> None:
        self.events.append(event)
        self.wake.set()

    def cancel_timers(self) -> None:
        for timer in (self.timeout, self.watch):
            if timer is not None:
                timer.cancel()
        self.timeout = self.watch = None

    def descendants(self, stage: str) -> set[str]:
        """`stage` and every stage that its output can reach in this request."""
        reached = {stage}
        for _ in self.plan.stages:
            reached |= {edge.target_stage for edge in self.edges if edge.source_stage in reached}
        return reached


def take_down(records: Mapping[str, RequestRecord], stage: str, message: FromStage, now: float) -> None:
    """What a stage tells of steps and of ends: progress of live requests (`now`, the loop's clock), and what belongs on
    their timelines."""
    for request_id in message.batch:
        record = records.get(request_id)
        if record is not None:
            record.progress = now
    for log in message.logs:
        record = records.get(log.request_id)
        if record is not None and record.timeline is not None:
            record.timeline.leave(stage, log.blocks)
