"""A timeline as clients read it, and how much of a request's time it accounts for."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from omnistage.engine.timeline import CLIENT_LANE, Timeline
from omnistage.spans import Kind, Span


class SpanView(msgspec.Struct, omit_defaults=True):
    """Seconds since the request arrived. `count` spans were folded into one; `busy_s` is their summed length."""

    kind: Kind
    lane: str
    name: str
    start_s: float
    duration_s: float
    seq: int | None = None
    count: int = 1
    busy_s: float | None = None


class TimelineView(msgspec.Struct):
    """`covered` is the part of `wall_s` that lies in some span, `busy` the part in which something was computed, moved,
    encoded or decoded for the request. `complete` is False while it goes on; one that is not `detailed` says only when
    the request was at which stage."""

    id: str
    request_id: str
    task: str
    complete: bool
    detailed: bool
    finish_reason: str | None
    wall_s: float
    covered: float
    busy: float
    spans: list[SpanView]
    object: str = "request.timeline"


BUSY: frozenset[Kind] = frozenset({"stage", "compute", "handoff", "encode", "decode", "front"})


def view_of(timeline: Timeline, now_s: float) -> TimelineView:
    """What is known of a request by now."""
    end_s = timeline.end_s
    until = end_s if end_s is not None else now_s
    wall_s = until - timeline.start_s
    spans = timeline.spans()
    busy = [span for span in spans if span.kind in BUSY and span.lane != CLIENT_LANE]
    return TimelineView(
        id=timeline.id,
        request_id=timeline.front.id if timeline.front is not None else "",
        task=timeline.task,
        complete=end_s is not None,
        detailed=timeline.detailed,
        finish_reason=timeline.finish_reason,
        wall_s=round(wall_s, 6),
        covered=_share(spans, timeline.start_s, until),
        busy=_share(busy, timeline.start_s, until),
        spans=[_shown(span, timeline.start_s) for span in spans],
    )


def _shown(span: Span, origin_s: float) -> SpanView:
    return SpanView(
        kind=span.kind,
        lane=span.lane,
        name=span.name,
        start_s=round(span.start_s - origin_s, 6),
        duration_s=round(span.end_s - span.start_s, 6),
        seq=span.seq if span.seq >= 0 else None,
        count=span.count,
        busy_s=round(span.busy_s, 6) if span.count > 1 else None,
    )


def union_s(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """Seconds of [start_s, end_s] that lie in at least one span."""
    total, at = 0.0, start_s
    for span in sorted(spans, key=lambda each: each.start_s):
        upto = min(span.end_s, end_s)
        total += max(0.0, upto - max(at, span.start_s))
        at = max(at, upto)
    return total


def _share(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    return round(union_s(spans, start_s, end_s) / (end_s - start_s), 4) if end_s > start_s else 1.0
