"""Where complete timelines go: handled one after the other in a thread of its own, off the event loop."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec

from omnistage.engine.timeline import Timeline, Timelines
from omnistage.entrypoints.trace.chrome import chrome_events
from omnistage.errors import ConfigError


class TraceSink(Protocol):
    """Takes complete timelines until it is closed."""

    def take(self, timeline: Timeline) -> None: ...

    def close(self) -> None: ...


class TraceFile:
    """A Chrome trace file of everything a server does: readable at any time, well-formed JSON once it is closed."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be written."""
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--trace {path}: cannot be written: {error.strerror}", param="trace") from None
        self._file.write(b"[")
        self._first = True

    def take(self, timeline: Timeline) -> None:
        for event in chrome_events(timeline):
            self._file.write((b"\n" if self._first else b",\n") + msgspec.json.encode(event))
            self._first = False
        self._file.flush()

    def close(self) -> None:
        self._file.write(b"\n]\n")
        self._file.close()


class SinkThread:
    """Feeds sinks from an engine's timelines."""

    def __init__(self, timelines: Timelines, sinks: list[TraceSink]) -> None:
        self._sinks = sinks
        self._thread = ThreadPoolExecutor(1, "omnistage-trace")
        timelines.sinks.append(self._on_complete)

    def _on_complete(self, timeline: Timeline) -> None:
        for sink in self._sinks:
            self._thread.submit(sink.take, timeline)

    def close(self) -> None:
        """Returns when every timeline that was complete has been taken."""
        self._thread.shutdown()
        for sink in self._sinks:
            sink.close()
