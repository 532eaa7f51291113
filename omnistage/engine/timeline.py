"""What happened to each request and when: spans per stage, kept for the last requests.

All times are seconds of the machine's monotonic clock, which its processes share. A stage takes spans down itself and
sends them when it lets go of a request; whatever is worth a thought is derived when somebody reads a timeline.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from omnistage.config.model import TraceConfig
from omnistage.request import FinishReason, OmniRequest, RequestMetrics
from omnistage.spans import Kind, Span, SpanBlock, SpanBook, spans_of

SERVER, CLIENT_LANE = "server", "client"


class Front:
    """An exchange with a client that engine requests are made for. `trace_headers`: its W3C trace context, if any."""

    def __init__(self, front_id: str, limit: int, trace_headers: Mapping[str, str]) -> None:
        self.id = front_id
        self.trace_headers = trace_headers
        self.arrived = time.monotonic()
        self.ended: float | None = None
        self.book = SpanBook(limit)
        self.timelines: list[Timeline] = []
        self.claims: list[str] = []

    @contextmanager
    def media(self) -> Iterator[None]:
        """Around media work: of inputs before the engine is asked, of outputs afterwards."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.book.add("encode" if self.timelines else "decode", "media", start_s, time.monotonic())

    def spans(self) -> list[Span]:
        """Of media work."""
        return [span for block in self.book.blocks() for span in spans_of(SERVER, block)]


class Visit(msgspec.Struct):
    """A request at a stage; `end_s` None while it is there."""

    lane: str
    start_s: float
    end_s: float | None = None


class Timeline:
    """One request's. `admitted_s` and `ended_s` bound its life in the engine, `start_s` and `end_s` that of its whole
    exchange. One that is not `detailed` tells only when the request was at which stage.
    """

    def __init__(
        self, request: OmniRequest, arrived_s: float, limit: int, front: Front | None = None, *, detailed: bool = True
    ) -> None:
        self.detailed = detailed
        self.id, self.task, self.owner = request.id, request.task, request.owner
        self.front = front
        self.arrived_s = arrived_s
        self.admitted_s = time.monotonic()
        self.ended_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self.metrics = RequestMetrics()
        self.book = SpanBook(limit)
        self.visits: list[Visit] = []
        self._blocks: list[tuple[str, list[SpanBlock]]] = []
        if front is not None:
            front.timelines.append(self)

    @property
    def start_s(self) -> float:
        return self.front.arrived if self.front is not None else self.arrived_s

    @property
    def end_s(self) -> float | None:
        """None while the request or its exchange goes on."""
        if self.ended_s is None or self.front is None:
            return self.ended_s
        if self.front.ended is None:
            return None
        return max(self.ended_s, self.front.ended, *(span.end_s for span in self.front.spans()))

    def enter(self, stage: str) -> None:
        self.visits.append(Visit(stage, time.monotonic()))

    def leave(self, stage: str, blocks: list[SpanBlock]) -> None:
        """A stage has let go of the request; `blocks` are what it took down."""
        self._blocks.append((stage, blocks))
        now_s = time.monotonic()
        for visit in self.visits:
            if visit.lane == stage and visit.end_s is None:
                visit.end_s = now_s

    def delivered(self, source: str, sent_s: float) -> None:
        """The client has taken a chunk."""
        if self.detailed:
            self.book.add("handoff", source, sent_s, time.monotonic())

    def _measured(self) -> list[Span]:
        blocks = [*self._blocks, (CLIENT_LANE, self.book.blocks())]
        return [span for lane, each in blocks for block in each for span in spans_of(lane, block)]

    def spans(self) -> list[Span]:
        """All spans in order of their start, those included that follow from the others: queueing, waiting, front."""
        now = time.monotonic()
        measured = self._measured()
        until = self.ended_s if self.ended_s is not None else now
        spans = [*measured, _span("queue", SERVER, "admission", self.arrived_s, self.admitted_s)]
        for visit in self.visits:
            left_s = visit.end_s if visit.end_s is not None else until
            if self.detailed:
                spans += _waits(visit.lane, visit.start_s, left_s, measured)
            else:
                spans.append(_span("stage", visit.lane, "stage", visit.start_s, left_s))
        spans += self._around_visits(until)
        if self.front is not None:
            spans += self.front.spans()
            spans.append(_span("front", SERVER, "prepare", self.front.arrived, self.arrived_s))
            if self.ended_s is not None:
                end_s = self.end_s
                spans.append(_span("front", SERVER, "answer", self.ended_s, end_s if end_s is not None else now))
        return sorted(spans, key=lambda span: (span.start_s, span.end_s))

    def _around_visits(self, until_s: float) -> list[Span]:
        """From admission until the first stage has the request ("dispatch"), and from the last stage's end until the
        client has all of the answer ("collect")."""
        first = min((visit.start_s for visit in self.visits), default=until_s)
        last = max((visit.end_s if visit.end_s is not None else until_s for visit in self.visits), default=until_s)
        around = [_span("queue", SERVER, "dispatch", self.admitted_s, first)]
        return [*around, _span("wait", SERVER, "collect", last, until_s)] if last < until_s else around


def _span(kind: Kind, lane: str, name: str, start_s: float, end_s: float) -> Span:
    return Span(kind, lane, name, start_s, end_s, end_s - start_s)


def _waits(lane: str, start_s: float, end_s: float, measured: list[Span]) -> list[Span]:
    """The gaps of a visit: "wait" until the last input came in the gap, "queue" from then on; a stage without inputs
    has queued until its first step. Later gaps without an input are waits too (for credit, or for the next turn)."""
    here = [span for span in measured if span.lane == lane and start_s <= span.end_s and span.start_s <= end_s]
    busy = sorted((span for span in here if span.kind == "compute"), key=lambda span: span.start_s)
    came = sorted(span.end_s for span in here if span.kind == "handoff")
    gaps: list[Span] = []
    at, first = start_s, True
    for until in (*(span.start_s for span in busy), end_s):
        if until > at:
            gaps += _gap(lane, at, until, [t for t in came if at <= t <= until], fresh=first and not came)
        if busy:
            at, first = max(at, busy.pop(0).end_s), False
    return gaps


def _gap(lane: str, start_s: float, end_s: float, came: list[float], *, fresh: bool) -> list[Span]:
    split = start_s if fresh else came[-1] if came else end_s
    parts = (_span("wait", lane, "wait", start_s, split), _span("queue", lane, "queue", split, end_s))
    return [part for part in parts if part.end_s > part.start_s]


Sink = Callable[[Timeline], None]


class Timelines:
    """The timelines of the last `trace.requests` requests; `sinks` are told of each one that is complete.

    `trace.detailed` of the requests that run get detailed ones, which bounds what tracing costs under load.
    """

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self._kept: OrderedDict[str, Timeline] = OrderedDict()
        self._claims: dict[str, Front] = {}
        self._detailed = 0
        self.sinks: list[Sink] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def enabled(self) -> bool:
        return self._config.enabled

    def find(self, request_id: str, owner: str) -> Timeline | None:
        """By the id of a request or of its exchange, among those of one owner."""
        found = self._kept.get(request_id)
        if found is None:
            ours = (t for t in reversed(self._kept.values()) if t.front is not None and t.front.id == request_id)
            found = next((t.front.timelines[0] for t in ours if t.front is not None), None)
        return found if found is not None and found.owner == owner else None

    # -- the exchange around requests

    def open(self, front_id: str, trace_headers: Mapping[str, str]) -> Front:
        """An exchange that has just come in; `close` it in any case."""
        return Front(front_id, self._config.spans, trace_headers)

    def claim(self, request_id: str, front: Front) -> None:
        """The next request of that id is made for an exchange."""
        front.claims.append(request_id)
        self._claims[request_id] = front

    def close(self, front: Front) -> None:
        front.ended = time.monotonic()
        for request_id in front.claims:
            self._claims.pop(request_id, None)
        for timeline in front.timelines:
            if timeline.ended_s is not None:
                self._complete(timeline)

    # -- requests

    def begin(self, request: OmniRequest, arrived_s: float) -> Timeline | None:
        """The timeline of a request that has just been admitted; None when none are kept."""
        if not self._config.enabled:
            return None
        detailed = self._detailed < self._config.detailed
        self._detailed += detailed
        front = self._claims.pop(request.id, None)
        timeline = Timeline(request, arrived_s, self._config.spans, front, detailed=detailed)
        self._kept[request.id] = timeline
        self._kept.move_to_end(request.id)
        if len(self._kept) > self._config.requests:
            self._kept.popitem(last=False)
        return timeline

    def end(self, timeline: Timeline | None) -> None:
        """The engine has nothing more to do for its client."""
        if timeline is None:
            return
        self._detailed -= timeline.detailed
        timeline.ended_s = time.monotonic()
        timeline.finish_reason = timeline.finish_reason or FinishReason.ABORT
        if timeline.front is None or timeline.front.ended is not None:
            self._complete(timeline)

    def _complete(self, timeline: Timeline) -> None:
        for sink in self.sinks:
            sink(timeline)
