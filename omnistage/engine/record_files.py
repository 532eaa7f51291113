"""The folder of a record: what ran (`record.json`), its requests and answers (`requests.journal`), its media by hash
(`media/`), and one journal per life of a stage replica. A bundle is such a folder of one failed request, without stage
journals."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from omnistage.config.model import OmniConfig, RecordConfig, TraceConfig
from omnistage.errors import ErrorInfo
from omnistage.payload import MultimodalPayload, PayloadHeader, read_payload
from omnistage.request import OmniRequest
from omnistage.runtime.journal import SUFFIX, JournalName, JournalWriter, RecordError, read_journal

HEADER = "record.json"
REQUESTS = f"requests{SUFFIX}"
MEDIA = "media"
FAILURES = "failures"
_HASH_BYTES = 16
_LENGTH_BYTES = 4
_PACKAGES = ("omnistage", "torch", "numpy", "transformers", "diffusers")


class Header(msgspec.Struct, kw_only=True):
    """What ran. `started_s` is Unix time."""

    kind: Literal["record", "bundle"]
    config: OmniConfig
    versions: dict[str, str]
    started_s: float


class Opened(msgspec.Struct, tag=True):
    """The first entry: a hash of `record.json`."""

    header: str


class Began(msgspec.Struct, tag=True):
    """A request was let in, `arrived_s` after the start. `inputs` (per client port) and `media` (per key) are names in
    `media/`; `edges` are (source, target) of the graph that carry something in it."""

    request: OmniRequest
    seed: int
    arrived_s: float
    edges: list[tuple[str, str]]
    inputs: dict[str, str]
    media: dict[str, str]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A hash of the first `nbytes` of a part of an answer."""

    source: str
    name: str
    nbytes: int
    digest: str


class Ended(msgspec.Struct, tag=True):
    """What a client got of a request, and how it ended."""

    id: str
    reason: str
    parts: list[Part]
    error: ErrorInfo | None = None


BookEntry = Opened | Began | Ended


class RecordFolder:
    """A folder that is being written. Raises RecordError for one that holds a record already."""

    def __init__(self, folder: Path, header: Header, max_bytes: int) -> None:
        self.folder = folder
        raw = msgspec.json.encode(header)
        try:
            (folder / MEDIA).mkdir(parents=True, exist_ok=True)
            self._book: JournalWriter[BookEntry] = JournalWriter(folder / REQUESTS, max_bytes)
        except FileExistsError:
            raise RecordError(f"record: {folder.name!r} holds a record already; choose a new folder") from None
        except OSError as error:
            raise RecordError(f"record: cannot write to {folder.name!r}: {error.strerror}") from None
        (folder / HEADER).write_bytes(raw)
        self._media_left = max_bytes
        self._book.write(Opened(_hash(raw)))

    def note(self, entry: BookEntry) -> bool:
        """False when there is no room for it."""
        return self._book.write(entry)

    def keep(self, payload: MultimodalPayload) -> str | None:
        """Writes a payload unless one of the same content is there; its name, or None when there is no room."""
        raw = encoded(payload)
        name = _hash(raw)
        file = self.folder / MEDIA / name
        if not file.exists():
            self._media_left -= len(raw)
            if self._media_left < 0:
                return None
            file.write_bytes(raw)
        return name

    def close(self) -> None:
        self._book.close()


class ReadRecord:
    """A record or bundle as it was written. Raises RecordError when a part of it is missing or was changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            raw = (folder / HEADER).read_bytes()
            entries: list[BookEntry] = list(read_journal(folder / REQUESTS, BookEntry))
        except OSError:
            raise RecordError(f"replay: {str(folder)!r} is no record: {HEADER} or {REQUESTS} is missing") from None
        if not entries or not isinstance(entries[0], Opened) or entries[0].header != _hash(raw):
            raise RecordError(f"record {HEADER}: was changed after it was written")
        try:
            self.header = msgspec.json.decode(raw, type=Header)
        except msgspec.MsgspecError as error:
            raise RecordError(f"record {HEADER}: written by another version: {error}") from None
        self.requests = {entry.request.id: entry for entry in entries if isinstance(entry, Began)}
        if len(self.requests) < sum(isinstance(entry, Began) for entry in entries):
            raise RecordError("record: two of its requests have the same id, so they cannot be told apart")
        self.answers = {entry.id: entry for entry in entries if isinstance(entry, Ended)}

    @property
    def journals(self) -> Mapping[JournalName, Path]:
        files = sorted(file for file in self.folder.glob(f"*{SUFFIX}") if file.name != REQUESTS)
        return {JournalName.of(file): file for file in files}

    def payload(self, name: str) -> MultimodalPayload:
        """A payload by its name. Raises RecordError."""
        try:
            raw = (self.folder / MEDIA / name).read_bytes()
        except OSError:
            raise RecordError(f"record {MEDIA}/{name}: is missing") from None
        if _hash(raw) != name:
            raise RecordError(f"record {MEDIA}/{name}: was changed after it was written")
        size = int.from_bytes(raw[:_LENGTH_BYTES], "little") + _LENGTH_BYTES
        header = msgspec.msgpack.decode(raw[_LENGTH_BYTES:size], type=PayloadHeader)
        return read_payload(header, raw[size:])


def header_of(kind: Literal["record", "bundle"], config: OmniConfig, started_s: float) -> Header:
    """The header of a new record: where it and traces go is left out."""
    plain = msgspec.structs.replace(config, record=RecordConfig(), trace=TraceConfig())
    return Header(kind=kind, config=plain, versions=versions(), started_s=started_s)


def versions() -> dict[str, str]:
    """Of what decides the bytes of answers."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def encoded(payload: MultimodalPayload) -> bytes:
    """Length of the header, header, body."""
    header, body = payload.packed()
    raw = msgspec.msgpack.encode(header)
    return len(raw).to_bytes(_LENGTH_BYTES, "little") + raw + body


def _hash(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=_HASH_BYTES).hexdigest()
