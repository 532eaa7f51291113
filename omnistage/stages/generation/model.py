"""What a model of a generation stage provides (encoders, vocoders, acoustic models). Torch-free protocol."""

from __future__ import annotations

from typing import Protocol, TypeVar

from omnistage.request import StageMetrics
from omnistage.stages.base import InputChunk, Produced, StageRequest

__all__ = ["GenerationModel", "Produced"]

S = TypeVar("S")


class GenerationModel(Protocol[S]):
    """A streaming, non-autoregressive component. `S` is its state of one request: everything carried between chunks.

    A chunk costs only its own frames, and the concatenation of what a request produced does not depend on how its input
    was chunked or which requests shared a batch.
    """

    def open(self, request: StageRequest) -> S:
        """A fresh state. Raises RequestError when the request can never run."""
        ...

    def feed(self, state: S, chunk: InputChunk) -> None:
        """Takes a chunk; copies or keeps it, and releases its payload when no view is held any more.

        When it raises (RequestError for bad content), it has neither taken nor released the chunk: the engine does.
        """
        ...

    def pending(self, state: S) -> int:
        """Units of work (rows, frames, clauses) that a step would do now; 0 when it must wait for input."""
        ...

    def run(self, states: list[S]) -> list[list[Produced]]:
        """One batched step over states with `pending > 0`: per state what it produced, in order.

        All or nothing: when it raises, every state is as it was before, so that the step can be repeated without the
        state that is at fault. Compute first, then change states.
        """
        ...

    def done(self, state: S) -> bool:
        """True when every output port of the request is closed."""
        ...

    def metrics(self, state: S) -> StageMetrics:
        """Counts of this request so far; the engine adds times, steps and chunks.

        Numbers in `extra` (such as "frames_in", "frames_out") become counters of the stage, summed over requests.
        """
        ...

    def close(self, state: S) -> None:
        """Releases payloads still held; called once per state, also after an abort or an error."""
        ...
