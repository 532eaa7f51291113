"""What a stage engine was told and what it did, entry by entry, in files that notice when they were changed.

A journal holds everything on which an engine's decisions depend: its calls in their order, the requests and chunks of
each, and every reading of the clock. Each entry carries a hash over itself and all entries before it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from omnistage.errors import ErrorCode, OmniError
from omnistage.request import StageRequest

logger = logging.getLogger(__name__)

SUFFIX = ".journal"
DIGEST_BYTES = 8
_LENGTH_BYTES = 4

T = TypeVar("T")


class RecordError(OmniError):
    """A record that cannot be read, or that somebody has changed."""

    default_code = ErrorCode.INVALID_REQUEST


class Emitted(msgspec.Struct, frozen=True, array_like=True):
    """A chunk that a step gave out; `digest` is a hash of its tensors and metadata."""

    request: str
    port: str
    final: bool
    digest: str


class Added(msgspec.Struct, tag=True, array_like=True):
    """A request came. `error` is why it was refused, "" if it was not; `clock` are the readings of the call (s)."""

    request: StageRequest
    error: str = ""
    clock: list[float] = []


class Fed(msgspec.Struct, tag=True, array_like=True):
    """Chunk `seq` of an input port came."""

    request: str
    port: str
    seq: int
    error: str = ""
    clock: list[float] = []


class Dropped(msgspec.Struct, tag=True, array_like=True):
    """A request was aborted, or ended with an error."""

    request: str
    clock: list[float] = []


class Held(msgspec.Struct, tag=True, array_like=True):
    """A request lost its credit, or has it back."""

    request: str
    held: bool
    clock: list[float] = []


class Decoded(msgspec.Struct, tag=True, array_like=True):
    """So many calls beside the steps have ended, in the order in which they were made."""

    count: int


class Stepped(msgspec.Struct, tag=True, array_like=True):
    """One step: the requests that it computed for, with how many rows each, and what it gave out. `only` restricted it
    to some requests; `finished` are (request, reason)."""

    only: tuple[str, ...] | None
    batch: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    emitted: tuple[Emitted, ...] = ()
    finished: tuple[tuple[str, str], ...] = ()
    error: str = ""
    clock: list[float] = []


Entry = Added | Fed | Dropped | Held | Decoded | Stepped


class JournalName(msgspec.Struct, frozen=True):
    """Which life of which replica a journal is of: a replica that is restarted begins another one."""

    stage: str
    replica: int
    life: int = 0

    @property
    def file(self) -> str:
        return f"{self.stage}-{self.replica}-{self.life}{SUFFIX}"

    @classmethod
    def of(cls, file: Path) -> JournalName:
        stage, replica, life = file.stem.rsplit("-", 2)
        return cls(stage, int(replica), int(life))


class JournalWriter(Generic[T]):
    """Appends to a new file, every entry at once, up to `max_bytes`. Raises FileExistsError for a file that exists."""

    def __init__(self, file: Path, max_bytes: int, mode: Literal["xb", "wb"] = "xb") -> None:
        self._file = file.open(mode, buffering=0)
        self._chain = hashlib.blake2b(file.name.encode(), digest_size=DIGEST_BYTES)
        self._left = max_bytes
        self._ended = False
        self._encode = msgspec.msgpack.Encoder().encode

    def write(self, entry: T) -> bool:
        """False, from then on, for an entry that the file or the disk has no room for: the record ends before it."""
        if self._ended:
            return False
        raw = self._encode(entry)
        self._left -= len(raw) + DIGEST_BYTES + _LENGTH_BYTES
        if self._left < 0:
            return self._end("its bound is reached")
        self._chain.update(raw)
        try:
            self._file.write(len(raw).to_bytes(_LENGTH_BYTES, "little") + self._chain.digest() + raw)
        except OSError as error:
            return self._end(error.strerror or "it cannot be written")
        return True

    def _end(self, why: str) -> bool:
        self._ended = True
        logger.error("record %s ends here: %s", self._file.name, why)
        return False

    def close(self) -> None:
        self._file.close()


def read_journal(file: Path, kind: Any) -> Iterator[Any]:
    """The entries of a file, of a type or a union of types; one that was cut off at its end is left out.

    Raises RecordError naming the first entry that is not what was written.
    """
    chain = hashlib.blake2b(file.name.encode(), digest_size=DIGEST_BYTES)
    decode = msgspec.msgpack.Decoder(kind).decode
    with file.open("rb") as source:
        for number, (digest, raw) in enumerate(_frames(source.read())):
            chain.update(raw)
            if chain.digest() != digest:
                raise RecordError(f"record {file.name}: entry {number} was changed after it was written")
            try:
                yield decode(raw)
            except msgspec.MsgspecError as error:
                raise RecordError(f"record {file.name}: entry {number} cannot be read: {error}") from None


def _frames(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    start, head = 0, _LENGTH_BYTES + DIGEST_BYTES
    while start + head <= len(data):
        size = int.from_bytes(data[start : start + _LENGTH_BYTES], "little")
        if start + head + size > len(data):
            return
        yield data[start + _LENGTH_BYTES : start + head], data[start + head : start + head + size]
        start += head + size


class NotingClock:
    """The machine's monotonic clock; keeps what the thread that made it reads."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._readings: list[float] = []

    def __call__(self) -> float:
        now = time.monotonic()
        if threading.get_ident() == self._owner:
            self._readings.append(now)
        return now

    def take(self) -> list[float]:
        """The readings since the last call."""
        taken, self._readings = self._readings, []
        return taken


class GivenClock:
    """Shows the thread that made it the readings that were given, and the last one when there are no more."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._given: list[float] = []
        self._shown: list[float] = []
        self._last = 0.0

    def give(self, readings: Sequence[float]) -> None:
        self._given = list(readings)

    def __call__(self) -> float:
        if threading.get_ident() != self._owner:
            return self._last
        if self._given:
            self._last = self._given.pop(0)
        self._shown.append(self._last)
        return self._last

    def take(self) -> list[float]:
        """The readings since the last call."""
        taken, self._shown = self._shown, []
        return taken
