"""The client's W3C Trace Context: what an exchange was asked with."""

from __future__ import annotations

from omnistage.entrypoints.http.asgi import Scope

TRACE_HEADERS = ("traceparent", "tracestate")
# Longer values are no valid ones.
MAX_TRACE_HEADER = 512


def trace_headers(scope: Scope) -> dict[str, str]:
    """The headers by name, as far as the client sent them; the first of several counts."""
    given = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
    found = {name: given.get(name, "") for name in TRACE_HEADERS}
    return {name: value for name, value in found.items() if 0 < len(value) <= MAX_TRACE_HEADER}
