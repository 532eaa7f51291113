"""Timelines as OpenTelemetry spans, sent by OTLP over HTTP. Needs the extra `otel`.

A request is a span of kind SERVER, a child of the client's `traceparent` (W3C Trace Context) where it sent one; what
happened to the request are its children, the longest `MAX_CHILDREN` of them where there are more.
"""

from __future__ import annotations

import logging
import threading
import time
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from omnistage.engine.timeline import Timeline
from omnistage.request import FinishReason
from omnistage.spans import Span

logger = logging.getLogger(__name__)
MAX_CHILDREN = 128
FLUSH_S = 3.0


def otlp_sink(url: str, served_name: str) -> OtelSink:
    """Exports to a collector's trace endpoint, such as http://localhost:4318/v1/traces; the path may be left out."""
    endpoint = url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1/traces"
    return OtelSink(OTLPSpanExporter(endpoint=endpoint), served_name)


class OtelSink:
    """A `TraceSink` that hands spans to an exporter, in batches."""

    def __init__(self, exporter: SpanExporter, served_name: str) -> None:
        self._exporter = exporter
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "omnistage", "omnistage.model": served_name}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("omnistage")
        self._epoch_s = time.time() - time.monotonic()

    def take(self, timeline: Timeline) -> None:
        headers = timeline.front.trace_headers if timeline.front is not None else {}
        root = self._tracer.start_span(
            f"omnistage {timeline.task}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            start_time=self._unix_ns(timeline.start_s),
            attributes={"omnistage.request_id": timeline.id, "omnistage.finish_reason": str(timeline.finish_reason)},
        )
        if timeline.finish_reason is FinishReason.ERROR:
            root.set_status(Status(StatusCode.ERROR))
        context = set_span_in_context(root)
        longest = sorted(timeline.spans(), key=lambda span: -span.busy_s)[:MAX_CHILDREN]
        for span in longest:
            child = self._tracer.start_span(
                f"{span.lane} {span.name}",
                context=context,
                start_time=self._unix_ns(span.start_s),
                attributes=_attributes(span),
            )
            child.end(self._unix_ns(span.end_s))
        end_s = timeline.end_s
        root.end(self._unix_ns(end_s if end_s is not None else time.monotonic()))

    def close(self) -> None:
        """Sends what is left, unless the collector takes longer than `FLUSH_S`: no server waits for it to stop."""
        flush = threading.Thread(target=self._provider.shutdown, name="omnistage-otel-flush", daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        if flush.is_alive():
            self._exporter.shutdown()
            logger.warning("the collector did not take the last spans within %.0f s: they are lost", FLUSH_S)

    def _unix_ns(self, monotonic_s: float) -> int:
        return int((self._epoch_s + monotonic_s) * 1e9)


def _attributes(span: Span) -> dict[str, str | int | float]:
    return {
        "omnistage.kind": span.kind,
        "omnistage.lane": span.lane,
        "omnistage.count": span.count,
        "omnistage.busy_s": span.busy_s,
    }
