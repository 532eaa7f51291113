"""The timeline route, the Server-Timing header, trace files and OpenTelemetry, over a real engine on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.engine.timeline import Front
from omnistage.entrypoints.http.access import ApiKey, KeyRing
from omnistage.entrypoints.trace import otel
from omnistage.entrypoints.trace.otel import MAX_CHILDREN, OtelSink, otlp_sink
from omnistage.entrypoints.trace.sinks import SinkThread, TraceFile, TraceSink
from omnistage.testing.leakcheck import settled
from tests.entrypoints.http.real import Running, serving_engine
from tests.entrypoints.realtime.talk import talking

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"format": "mp3", "voice": "echo"}}


@pytest.fixture
async def engine() -> AsyncIterator[AsyncOmniEngine]:
    async with AsyncOmniEngine(resolve_config("echo3", None, {"placement": "inline"})) as running:
        yield running
        await settled(running)


@pytest.fixture
async def server(engine: AsyncOmniEngine) -> AsyncIterator[Running]:
    async with serving_engine(engine) as running:
        yield running


async def chat(server: Running, text: str = "a few words to say", headers: dict | None = None, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    response = await server.http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response


async def timeline(server: Running, request_id: str) -> dict[str, Any]:
    response = await server.http.get(f"/v1/requests/{request_id}/timeline")
    assert response.status_code == 200, response.text
    view: dict[str, Any] = response.json()
    return view


async def test_timeline_by_request_id_and_by_answer_id_covers_the_exchange(server: Running) -> None:
    response = await chat(server, **SPOKEN)
    view = await timeline(server, response.headers["x-request-id"])
    assert view == await timeline(server, response.json()["id"])
    assert view["complete"]
    assert (view["task"], view["finish_reason"], view["object"]) == ("chat", "stop", "request.timeline")
    assert view["covered"] >= 0.99
    assert {span["lane"] for span in view["spans"]} == {"server", "client", "thinker", "talker", "wave"}
    assert {span["kind"] for span in view["spans"]} >= {"front", "queue", "compute", "handoff", "encode"}
    last = max(span["start_s"] + span["duration_s"] for span in view["spans"])
    assert last == pytest.approx(view["wall_s"], abs=1e-4)


async def test_streamed_answer_has_a_timeline_too(server: Running) -> None:
    response = await chat(server, stream=True)
    view = await timeline(server, response.headers["x-request-id"])
    assert view["complete"]
    assert view["covered"] >= 0.99
    assert "server-timing" not in response.headers


def test_media_that_a_client_sends_show_as_decoding() -> None:
    front = Front("req", 64, {})
    with front.media():
        pass
    assert [(span.kind, span.lane) for span in front.spans()] == [("decode", "server")]


async def test_unknown_request_format_and_query_are_refused(server: Running) -> None:
    for path, status in (
        ("/v1/requests/chatcmpl-nope/timeline", 404),
        ("/v1/requests/x", 404),
        ("/v1/requests//timeline", 404),
        ("/v1/requests/x/timeline?format=svg", 400),
        ("/v1/requests/x/timeline?verbose=1", 400),
    ):
        assert (await server.http.get(path)).status_code == status, path


async def test_key_sees_the_timelines_of_its_own_requests_only(engine: AsyncOmniEngine) -> None:
    names = ("one", "two")
    keys = [ApiKey(hashlib.sha256(name.encode()).digest(), frozenset({"infer"}), name) for name in names]
    async with serving_engine(engine, KeyRing(keys)) as server:
        headers = [{"authorization": f"Bearer {name}"} for name in names]
        response = await chat(server, headers=headers[0])
        path = f"/v1/requests/{response.json()['id']}/timeline"
        answers = [(await server.http.get(path, headers=each)).status_code for each in (*headers, {})]
        assert answers == [200, 404, 401]


async def test_server_timing_of_a_whole_answer_adds_up(server: Running) -> None:
    response = await chat(server, **SPOKEN)
    entries = re.findall(r"([\w-]+);dur=([\d.]+)(?:, |$)", response.headers["server-timing"])
    timing = {name: float(value) for name, value in entries}
    stages = ("thinker", "talker", "wave")
    wanted = {f"{stage}-{kind}" for stage in stages for kind in ("queue", "compute", "handoff")}
    assert set(timing) == wanted | {"total", "admission", "encode"}
    assert 0 < timing["encode"] < timing["total"]
    view = await timeline(server, response.headers["x-request-id"])
    assert timing["total"] / 1e3 <= view["wall_s"]
    computed = sum(s["duration_s"] for s in view["spans"] if (s["kind"], s["lane"]) == ("compute", "wave"))
    assert timing["wave-compute"] / 1e3 == pytest.approx(computed, rel=0.05)


def check_trace(events: list[dict[str, Any]]) -> None:
    """Raises AssertionError unless the events are what the Trace Event Format asks of complete and metadata events."""
    named: dict[str, set[tuple[int, int]]] = defaultdict(set)
    ends: dict[tuple[int, int], float] = {}
    for event in events:
        assert {"ph", "pid", "tid", "ts", "name"} <= event.keys()
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        track = (event["pid"], event["tid"])
        if event["ph"] == "M":
            assert isinstance(event["args"]["name"], str)
            named[event["name"]].add(track)
            continue
        assert event["ph"] == "X"
        assert event["dur"] >= 0
        assert track in named["thread_name"]
        assert event["ts"] >= ends.get(track, 0.0) - 0.01, "spans of one thread overlap"
        ends[track] = event["ts"] + event["dur"]
    assert {pid for pid, _ in named["thread_name"]} == {pid for pid, _ in named["process_name"]}


async def test_chrome_format_holds_named_threads_whose_spans_do_not_overlap(server: Running) -> None:
    response = await chat(server, **SPOKEN)
    path = f"/v1/requests/{response.json()['id']}/timeline"
    trace = (await server.http.get(path, params={"format": "chrome"})).json()
    check_trace(trace["traceEvents"])
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"thinker", "talker", "wave", "server", "hand-off into wave"} <= names
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len((await server.http.get(path)).json()["spans"])


async def traced(engine: AsyncOmniEngine, sinks: list[TraceSink], count: int = 1, headers: dict | None = None) -> None:
    """Chats under sinks, which are closed at the end."""
    thread = SinkThread(engine.timelines, sinks)
    async with serving_engine(engine) as server:
        await asyncio.gather(*(chat(server, headers=headers) for _ in range(count)))
    await asyncio.to_thread(thread.close)


async def test_trace_file_holds_all_requests(engine: AsyncOmniEngine, tmp_path: Path) -> None:
    await traced(engine, [TraceFile(tmp_path / "trace.json")], count=3)
    events = json.loads((tmp_path / "trace.json").read_text())
    check_trace(events)
    assert len({event["pid"] for event in events}) == 3


def test_trace_file_of_an_idle_server_is_valid(tmp_path: Path) -> None:
    TraceFile(tmp_path / "trace.json").close()
    assert json.loads((tmp_path / "trace.json").read_text()) == []


async def test_open_telemetry_spans_hang_below_the_clients_trace(engine: AsyncOmniEngine) -> None:
    exporter = InMemorySpanExporter()
    await traced(engine, [OtelSink(exporter, "echo3")], headers=TRACEPARENT)
    spans = exporter.get_finished_spans()
    (root,) = [span for span in spans if span.kind is SpanKind.SERVER]
    assert root.name == "omnistage chat"
    assert root.context is not None
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    children = [span for span in spans if span is not root]
    assert 3 < len(children) <= MAX_CHILDREN
    assert root.start_time is not None
    assert root.end_time is not None
    for child in children:
        assert child.parent is not None
        assert child.parent.span_id == root.context.span_id
        assert child.start_time is not None
        assert child.end_time is not None
        assert root.start_time <= child.start_time <= child.end_time <= root.end_time


async def test_realtime_responses_hang_below_the_trace_of_the_handshake(engine: AsyncOmniEngine) -> None:
    exporter = InMemorySpanExporter()
    thread = SinkThread(engine.timelines, [OtelSink(exporter, "echo3")])
    async with serving_engine(engine) as server:
        url = str(server.http.base_url)
        async with talking(url, additional_headers=TRACEPARENT) as talk:
            await talk.say("Hello")
            done = await talk.answer()
        assert (await timeline(server, done["id"]))["covered"] >= 0.99
    await asyncio.to_thread(thread.close)
    (root,) = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert root.parent is not None
    assert (f"{root.parent.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)


async def test_collector_that_hangs_does_not_keep_a_server_from_stopping(
    engine: AsyncOmniEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otel, "FLUSH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sink = otlp_sink(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", "echo3")
        started = time.monotonic()
        await traced(engine, [sink])
        assert time.monotonic() - started < 5
    assert "the collector did not take the last spans" in caplog.text


class Collector(BaseHTTPRequestHandler):
    """Keeps what a batch of spans is called."""

    names: list[str]

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


async def test_spans_reach_a_collector_by_otlp(engine: AsyncOmniEngine) -> None:
    names: list[str] = []
    handler = type("Handler", (Collector,), {"names": names})
    with HTTPServer(("127.0.0.1", 0), handler) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            await traced(engine, [otlp_sink(f"http://127.0.0.1:{collector.server_port}", "echo3")])
        finally:
            await asyncio.to_thread(collector.shutdown)
            thread.join()
    assert "omnistage chat" in names
    assert "thinker decode" in names
