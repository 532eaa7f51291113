"""Counters of the HTTP front, exposed after the engine's own on /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class HttpMetrics:
    """Requests by route and status, and how many are being answered now. Owns its registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "omnistage_http_requests", "Answered HTTP requests.", ("route", "status"), registry=self._registry
        )
        self._disconnects = Counter(
            "omnistage_http_disconnects", "Requests whose client left before the answer ended.", registry=self._registry
        )
        self._in_flight = Gauge("omnistage_http_in_flight", "HTTP requests in progress.", registry=self._registry)

    def started(self) -> None:
        self._in_flight.inc()

    def finished(self, route: str, status: int) -> None:
        """`status` 0 stands for a client that left."""
        self._in_flight.dec()
        if status == 0:
            self._disconnects.inc()
        else:
            self._requests.labels(route, str(status)).inc()

    def render(self) -> bytes:
        """Prometheus text exposition."""
        return generate_latest(self._registry)
