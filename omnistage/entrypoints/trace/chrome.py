"""Timelines as Chrome trace events, which Perfetto and chrome://tracing show.

The format: "Trace Event Format" of the Chromium project. A request is a process, a lane of it a thread; spans of one
lane that overlap get threads of their own. Times are microseconds of the machine's monotonic clock.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from omnistage.engine.timeline import Timeline
from omnistage.spans import Span

Event = dict[str, Any]
_MICROSECONDS = 1e6
# Kinds that cannot share a thread with the steps of their lane.
_APART = {"handoff": "hand-off into {lane}", "decode": "media of {lane}", "encode": "media of {lane}"}


def chrome_trace(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """A whole trace file, as plain data."""
    return {"traceEvents": [event for one in timelines for event in chrome_events(one)], "displayTimeUnit": "ms"}


def chrome_events(timeline: Timeline) -> Iterator[Event]:
    """The events of one request. Its process number is drawn from its id, so that files can be joined."""
    pid = zlib.crc32(timeline.id.encode()) & 0x7FFFFFFF
    yield _name("process_name", pid, 0, f"{timeline.task} {timeline.id}")
    threads: dict[str, int] = {}
    free_at: dict[str, float] = {}
    for span in timeline.spans():
        track = _track(span, free_at)
        free_at[track] = span.end_s
        if track not in threads:
            threads[track] = len(threads) + 1
            yield _name("thread_name", pid, threads[track], track)
        yield _event(span, pid, threads[track])


def _track(span: Span, free_at: dict[str, float]) -> str:
    """The first thread of the span's lane that is free when it starts."""
    lane = _APART.get(span.kind, "{lane}").format(lane=span.lane)
    number, track = 1, lane
    while free_at.get(track, 0.0) > span.start_s:
        number += 1
        track = f"{lane} {number}"
    return track


def _event(span: Span, pid: int, tid: int) -> Event:
    arguments: dict[str, Any] = {"count": span.count, "busy_ms": round(span.busy_s * 1e3, 3)}
    if span.seq >= 0:
        arguments["seq"] = span.seq
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": pid,
        "tid": tid,
        "ts": round(span.start_s * _MICROSECONDS, 3),
        "dur": round((span.end_s - span.start_s) * _MICROSECONDS, 3),
        "args": arguments,
    }


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
