"""The contract of every stage engine. Torch-free.

A stage engine owns the work of one stage replica. The stage loop (`omnistage.runtime.loop`) calls it from one thread:
messages in (`add`, `feed`, `abort`), then `step()` while `has_work()`. Nothing here blocks, sleeps or polls.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from omnistage.errors import ErrorInfo
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason, StageMetrics, StageRequest

__all__ = ["Computed", "Emission", "Finished", "InputChunk", "Produced", "StageEngine", "StageRequest", "StepOutput"]


class InputChunk(msgspec.Struct, kw_only=True):
    """One chunk for a port, in order: the loop guarantees that `seq` counts 0, 1, 2, ... and that `final` is last.

    The engine calls `payload.release()` exactly once when it holds no view of it any more, at the latest when the
    request ends or is aborted. Releasing is what gives the producer its credit back.
    """

    request_id: str
    port: str
    seq: int
    final: bool
    payload: MultimodalPayload


class Emission(msgspec.Struct, kw_only=True):
    """A chunk that a step produced for one output port. `final` closes the port; its payload may be empty."""

    request_id: str
    port: str
    payload: MultimodalPayload
    final: bool = False


class Produced(msgspec.Struct, kw_only=True):
    """A chunk for one output port, as a model gives it out."""

    port: str
    payload: MultimodalPayload
    final: bool = False


class Finished(msgspec.Struct, kw_only=True):
    """The stage holds nothing of the request any more. Comes exactly once, after the final emission of each port.

    After `abort()` an engine emits neither emissions nor a `Finished` for the request.
    """

    request_id: str
    reason: FinishReason
    metrics: StageMetrics = msgspec.field(default_factory=StageMetrics)
    error: ErrorInfo | None = None


class Computed(msgspec.Struct, frozen=True):
    """A stretch of work of a step, in seconds of the machine's monotonic clock: for which requests of the step's batch
    (empty: for all of them), in which phase."""

    phase: str
    start_s: float
    end_s: float
    requests: tuple[str, ...] = ()


class StepOutput(msgspec.Struct, kw_only=True):
    """What one `step()` produced; `batch` lists the requests that the step computed for.

    `rows` says how much of the step each of them was (rows, tokens); empty when all had an equal part. `spans` says
    when it computed what.
    """

    emissions: list[Emission] = []
    finished: list[Finished] = []
    batch: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    spans: list[Computed] = []


class StageEngine(Protocol):
    """See the module docstring. `step` may raise anything: the loop then calls `step(only=...)` with one request at a
    time to find the culprit, so a step that raises must leave every request as it was before the step."""

    def add(self, request: StageRequest) -> None:
        """Takes a request. Raises RequestError when it can never run (too long, bad parameter): nothing is kept."""
        ...

    def feed(self, chunk: InputChunk) -> None:
        """Takes a chunk of a request that was added and is not finished. Raises RequestError for bad content."""
        ...

    def abort(self, request_id: str) -> None:
        """Drops everything held of the request, releasing its payloads; unknown ids are ignored."""
        ...

    def hold(self, request_id: str, held: bool) -> None:
        """While held, a request gets no further compute that would emit (a consumer is out of credit)."""
        ...

    def has_work(self) -> bool:
        """True when `step()` would compute or emit something now."""
        ...

    def step(self, only: frozenset[str] | None = None) -> StepOutput:
        """One step over the requests that can run (restricted to `only` if given)."""
        ...

    def request_ids(self) -> frozenset[str]:
        """The requests of which anything is held."""
        ...

    def counters(self) -> dict[str, float]:
        """Gauges and counters of this engine for metrics and tests (names are stable, values are numbers)."""
        ...

    def check_integrity(self) -> None:
        """Raises IntegrityError when the books of an owned resource do not add up."""
        ...

    def close(self) -> None:
        """Releases everything, threads included."""
        ...
