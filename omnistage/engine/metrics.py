"""Metrics by output modality: per request in its last event, over all requests as Prometheus series."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omnistage.engine.record import RequestRecord
from omnistage.messages import FromStage
from omnistage.request import FinishReason, OmniRequestOutput, RequestMetrics, StageMetrics
from omnistage.runtime.stage_runtime import Replica

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
STAGE_SECONDS = (0.001, 0.005, *SECONDS)
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0, 2.0, 5.0)
_PREFIX = "omnistage"


class EngineMetrics:
    """Series of one engine in a registry of its own. `replicas` and `gauges` are read when scraped."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace=_PREFIX, registry=self._registry)
        histogram = partial(Histogram, namespace=_PREFIX, registry=self._registry)
        self._requests = counter("requests", "Requests by task and finish reason", ["task", "reason"])
        self._rejected = counter("requests_rejected", "Requests not admitted, by code", ["code"])
        self._ttft = histogram("ttft_seconds", "Time to first text", ["task"], buckets=SECONDS)
        self._tpot = histogram("tpot_seconds", "Time per output token after the first", ["task"], buckets=SECONDS)
        self._ttfp = histogram("ttfp_seconds", "Time to first media packet", ["task"], buckets=SECONDS)
        self._e2el = histogram("e2el_seconds", "End-to-end latency", ["task"], buckets=SECONDS)
        self._rtf = histogram("rtf", "Wall time / audio duration", ["task"], buckets=RATIOS)
        self._text_tokens = counter("text_tokens", "Text tokens delivered")
        self._audio_seconds = counter("audio_seconds", "Audio seconds delivered")
        self._images = counter("images", "Pictures delivered, previews not counted")
        self._frames = counter("video_frames", "Video frames delivered")
        self._tokens = counter("stage_tokens", "Tokens of requests that a stage has done", ["stage", "kind"])
        self._stage_seconds = histogram(
            "stage_seconds", "What a request spent at a stage, by kind", ["stage", "kind"], buckets=STAGE_SECONDS
        )
        self._chunks = counter("stage_chunks", "Chunks a stage handed on", ["stage", "replica"])
        self._bytes = counter("stage_bytes", "Payload bytes a stage handed on", ["stage", "replica"])

    def watch(self, replicas: Callable[[], list[Replica]], gauges: Callable[[], dict[str, float]]) -> None:
        """Adds the state of replicas and the engine's own gauges to every scrape."""
        self._registry.register(_Live(replicas, gauges))

    def render(self) -> bytes:
        return generate_latest(self._registry)

    # -- events

    def count_rejection(self, code: str) -> None:
        self._rejected.labels(code).inc()

    def observe_stage(self, replica: Replica, message: FromStage) -> None:
        if message.chunks:
            labels = (replica.id.stage, str(replica.id.index))
            self._chunks.labels(*labels).inc(len(message.chunks))
            self._bytes.labels(*labels).inc(sum(chunk.nbytes for chunk in message.chunks))
        for end in message.finished:
            if end.error is None:
                self._observe_visit(replica.id.stage, end.metrics)

    def _observe_visit(self, stage: str, metrics: StageMetrics) -> None:
        for kind, seconds in (
            ("queue", metrics.queue_s),
            ("compute", metrics.compute_s),
            ("handoff", metrics.handoff_s),
        ):
            self._stage_seconds.labels(stage, kind).observe(seconds)
        for kind, count in (
            ("input", metrics.input_tokens),
            ("cached", metrics.cached_tokens),
            ("output", metrics.output_tokens),
        ):
            if count:
                self._tokens.labels(stage, kind).inc(count)

    def observe_delivery(self, record: RequestRecord, output: OmniRequestOutput, now: float) -> None:
        timing = record.timing
        if output.text or output.token_ids:
            timing.first_text = timing.first_text if timing.first_text is not None else now
            timing.last_text = now
            timing.text_tokens += len(output.token_ids)
            self._text_tokens.inc(len(output.token_ids))
        if output.payload is None or not output.payload.tensors:
            return
        timing.first_media = timing.first_media if timing.first_media is not None else now
        if output.modality in ("image", "video") and output.modality in output.payload.tensors:
            counter = self._images if output.modality == "image" else self._frames
            counter.inc(len(output.payload[output.modality]))
        if "audio" in output.payload.tensors:
            samples = output.payload["audio"].shape[-1]
            timing.audio_samples += samples
            timing.sample_rate = int(output.payload.meta.get("sample_rate", 0))
            self._audio_seconds.inc(samples / timing.sample_rate if timing.sample_rate else 0.0)

    def request_metrics(self, record: RequestRecord) -> RequestMetrics:
        """The figures of a request that has just ended; deliveries that its client has not taken yet do not count."""
        timing = record.timing
        ended = timing.ended if timing.ended is not None else timing.admitted
        audio_s = timing.audio_samples / timing.sample_rate if timing.sample_rate else None
        return RequestMetrics(
            e2el_s=ended - timing.admitted,
            ttft_s=_since(timing.admitted, timing.first_text),
            tpot_s=_tpot(timing.first_text, timing.last_text, timing.text_tokens),
            ttfp_s=_since(timing.admitted, timing.first_media),
            rtf=(ended - timing.admitted) / audio_s if audio_s else None,
            audio_s=audio_s,
            stages=record.metrics,
        )

    def count_request(self, record: RequestRecord, reason: FinishReason) -> None:
        task = record.request.task
        self._requests.labels(task, str(reason)).inc()

    def observe_request(self, task: str, metrics: RequestMetrics) -> None:
        """Latencies of a request that its client received whole."""
        self._e2el.labels(task).observe(metrics.e2el_s)
        for histogram, value in (
            (self._ttft, metrics.ttft_s),
            (self._tpot, metrics.tpot_s),
            (self._ttfp, metrics.ttfp_s),
            (self._rtf, metrics.rtf),
        ):
            if value is not None:
                histogram.labels(task).observe(value)


def _since(start: float, moment: float | None) -> float | None:
    return None if moment is None else moment - start


def _tpot(first: float | None, last: float | None, tokens: int) -> float | None:
    return (last - first) / (tokens - 1) if first is not None and last is not None and tokens > 1 else None


class _Live(Collector):
    def __init__(self, replicas: Callable[[], list[Replica]], gauges: Callable[[], dict[str, float]]) -> None:
        self._replicas = replicas
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", f"Engine gauge {name}", value=value)
        families: dict[str, GaugeMetricFamily] = {}
        for replica in self._replicas():
            values = {"up": float(replica.ready), "restarts": float(replica.restarts), "load": float(replica.load)}
            for name, value in (values | replica.counters).items():
                family = families.get(name)
                if family is None:
                    unit = name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name
                    family = families[name] = GaugeMetricFamily(
                        f"{_PREFIX}_stage_{unit}", f"Stage figure {name}", labels=["stage", "replica"]
                    )
                family.add_metric([replica.id.stage, str(replica.id.index)], value)
        yield from families.values()
