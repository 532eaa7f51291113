"""Every control message between the orchestrator and a stage replica, and their framing.

One `ToStage` or `FromStage` carries all that one turn of a loop has to say to one peer. Payload bytes are elsewhere
(`Chunk.offset` in the producer's arena, `Chunk.local` in the producer's process) unless they are small (`Chunk.body`).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from omnistage.errors import ErrorInfo
from omnistage.request import FinishReason, StageMetrics, StageRequest
from omnistage.spans import VisitLog

MAX_FRAME_BYTES = 1 << 28
_LENGTH_BYTES = 4


class ChunkKey(msgspec.Struct, frozen=True, array_like=True):
    """Identity of one chunk: `source` is "stage.port", `seq` counts from 0 per request, epoch and source."""

    request_id: str
    epoch: int
    source: str
    seq: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A hand-off as the orchestrator sees it. `header` is an encoded `PayloadHeader`; the body is one of:

    `body` (bytes in the message), `offset` >= 0 (extent of the arena of `source`'s replica) or `local` (handed over
    by reference inside the producer's process). `sent_s` is the machine's monotonic clock when it was produced.
    """

    key: ChunkKey
    replica: int
    final: bool
    header: msgspec.Raw
    nbytes: int
    body: bytes = b""
    offset: int = -1
    local: bool = False
    port: str = ""
    sent_s: float = 0.0


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of an arena that a chunk still occupies."""

    key: ChunkKey
    offset: int
    nbytes: int


class Probe(msgspec.Struct, frozen=True, array_like=True):
    """What a replica holds of a request: the next seq it expects per input port, the chunks it has sent per output
    port; `known` False if it holds nothing."""

    request_id: str
    epoch: int
    known: bool = False
    received: dict[str, int] = {}
    sent: dict[str, int] = {}


class Abort(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request in one of its epochs. `came` counts the chunks that the orchestrator has per output port:
    what the replica has stored beyond them is of no use any more."""

    request_id: str
    epoch: int
    came: dict[str, int] = {}


class Visit(msgspec.Struct, frozen=True, array_like=True):
    """A request in one of its epochs, at one stage."""

    request_id: str
    epoch: int


class VisitEnd(msgspec.Struct, frozen=True, array_like=True):
    """A stage has finished a request; `sent` counts the chunks sent per output port."""

    request_id: str
    epoch: int
    reason: FinishReason
    metrics: StageMetrics
    sent: dict[str, int]
    error: ErrorInfo | None = None


class ToStage(msgspec.Struct, omit_defaults=True):
    """Orchestrator to replica, in order of application: aborts, releases, adds, chunks, probes, shutdown."""

    aborts: list[Abort] = []
    released: list[ChunkKey] = []
    adds: list[StageRequest] = []
    chunks: list[Chunk] = []
    probes: list[Visit] = []
    shutdown: bool = False


class FromStage(msgspec.Struct, omit_defaults=True):
    """Replica to orchestrator: the outcome of one turn of its loop. `ready`: its engine stands."""

    chunks: list[Chunk] = []
    consumed: list[ChunkKey] = []
    finished: list[VisitEnd] = []
    aborted: list[Visit] = []
    batch: list[str] = []
    probes: list[Probe] = []
    logs: list[VisitLog] = []
    counters: dict[str, float] = {}
    ready: bool = False
    fatal: ErrorInfo | None = None


def frame(message: ToStage | FromStage) -> bytes:
    """The bytes of one framed message: 4-byte little-endian length, then msgpack."""
    buffer = bytearray(_LENGTH_BYTES)
    msgspec.msgpack.Encoder().encode_into(message, buffer, _LENGTH_BYTES)
    buffer[:_LENGTH_BYTES] = (len(buffer) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
    return bytes(buffer)


class FrameBuffer:
    """Cuts a byte stream into frames. Raises ValueError for a frame over `MAX_FRAME_BYTES`."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def push(self, data: bytes | memoryview) -> Iterator[bytes]:
        self._buffer += data
        start = 0
        while (size := self._size(start)) is not None and len(self._buffer) >= start + _LENGTH_BYTES + size:
            start += _LENGTH_BYTES
            yield bytes(self._buffer[start : start + size])
            start += size
        if start:
            del self._buffer[:start]

    def _size(self, start: int) -> int | None:
        if len(self._buffer) < start + _LENGTH_BYTES:
            return None
        size = int.from_bytes(self._buffer[start : start + _LENGTH_BYTES], "little")
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"frame of {size} bytes")
        return size
