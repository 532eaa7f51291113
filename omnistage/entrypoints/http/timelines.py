"""GET /v1/requests/{id}/timeline, and the Server-Timing header of whole answers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from omnistage.engine.timeline import Front, Timeline
from omnistage.engine.timeline_view import view_of
from omnistage.entrypoints.http.asgi import JSON, Exchange
from omnistage.entrypoints.http.parse import read_query
from omnistage.entrypoints.http.sse import json_bytes
from omnistage.entrypoints.http.state import ServerState
from omnistage.entrypoints.trace.chrome import chrome_trace
from omnistage.errors import ErrorCode, RequestError
from omnistage.request import StageMetrics

_SUFFIX = "/timeline"
FORMATS = ("json", "chrome")


async def timeline(state: ServerState, exchange: Exchange) -> None:
    """What happened to a request and when, by its id or its answer's x-request-id; `?format=chrome` for Perfetto."""
    request_id = exchange.path_tail.removesuffix(_SUFFIX)
    if request_id == exchange.path_tail:
        raise RequestError("there is no such route", code=ErrorCode.NOT_FOUND)
    shape = _format(exchange)
    found = state.engine.timelines.find(request_id, state.owner)
    if found is None:
        raise RequestError("no timeline is kept of a request of this id", code=ErrorCode.NOT_FOUND, param="id")
    if shape == "chrome":
        await exchange.answer(200, JSON, msgspec.json.encode(chrome_trace([found])))
    else:
        await exchange.answer(200, JSON, json_bytes(view_of(found, time.monotonic())))


def _format(exchange: Exchange) -> str:
    shape = read_query(exchange, {"format"}).get("format", "json")
    if shape not in FORMATS:
        raise RequestError(f"format: one of {', '.join(FORMATS)}", param="format")
    return shape


def server_timing(front: Front) -> bytes:
    """The header's value (W3C Server Timing), milliseconds: of the exchange so far, and per stage what its request
    spent there queueing, computing and on hand-offs. Only the first choice's stages are shown."""
    entries = [("total", time.monotonic() - front.arrived)]
    if front.timelines:
        entries += _of_request(front.timelines[0])
    spent = {kind: sum(s.busy_s for s in front.spans() if s.kind == kind) for kind in ("decode", "encode")}
    entries += [(kind, seconds) for kind, seconds in spent.items() if seconds]
    return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in entries).encode()


def _of_request(found: Timeline) -> Iterator[tuple[str, float]]:
    yield "admission", found.admitted_s - found.arrived_s
    for stage, metrics in found.metrics.stages.items():
        yield from _of_stage(stage, metrics)


def _of_stage(stage: str, metrics: StageMetrics) -> Iterator[tuple[str, float]]:
    yield f"{stage}-queue", metrics.queue_s
    yield f"{stage}-compute", metrics.compute_s
    yield f"{stage}-handoff", metrics.handoff_s
