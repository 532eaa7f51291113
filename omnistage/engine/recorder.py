"""Writes down what an engine is asked and what it answers, in a thread of its own; keeps failed requests as bundles."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from omnistage.config.model import OmniConfig
from omnistage.engine.answer_hash import AnswerHash
from omnistage.engine.record import ClientEvent, RequestRecord
from omnistage.engine.record_files import FAILURES, Began, Ended, RecordFolder, header_of
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason, OmniRequest
from omnistage.runtime.journal import RecordError

logger = logging.getLogger(__name__)

_UNFIT = re.compile(r"[^\w.-]+")
_NAME_CHARS = 64


class Recorder:
    """One record, from `open` to `close`. Its calls come from the engine's event loop and return at once."""

    def __init__(self, config: OmniConfig) -> None:
        self._config = config
        self._settings = config.record
        self._folder: RecordFolder | None = None
        self._started_s = time.time()
        self._writer = ThreadPoolExecutor(1, "record")
        self._hashes: dict[str, AnswerHash] = {}
        self._full = False
        self._closed = False
        self._failures = 0

    def open(self) -> None:
        """Begins the record. Raises RecordError when the folder holds one already."""
        header = header_of("record", self._config, self._started_s)
        self._folder = RecordFolder(Path(self._settings.folder), header, self._settings.max_mb << 20)

    def close(self) -> None:
        """Writes what is left."""
        self._closed = True
        self._writer.shutdown(wait=True)
        if self._folder is not None:
            self._folder.close()

    def began(self, record: RequestRecord) -> None:
        """A request was let in."""
        self._hashes[record.id] = AnswerHash()
        arrived_s = time.time() - self._started_s
        self._later(lambda folder: _write_beginning(folder, record, arrived_s))

    def delivered(self, record: RequestRecord, event: ClientEvent) -> None:
        """The client was given an event."""
        if event.key is not None:
            output = event.output
            self._hashes[record.id].take(event.source, output.text, output.token_ids, output.payload)

    def ended(self, record: RequestRecord, reason: FinishReason) -> None:
        """The client gets nothing more of a request."""
        entry = Ended(id=record.id, reason=reason.value, parts=self._hashes.pop(record.id).parts(), error=record.error)
        self._later(lambda folder: folder.note(entry))
        if record.error is not None and not self._closed:
            self._writer.submit(self._keep_failed, record, entry)

    def _later(self, write: Callable[[RecordFolder], bool]) -> None:
        if not self._closed:  # what ends with the engine has no end in the record
            self._writer.submit(self._write, write)

    def _write(self, write: Callable[[RecordFolder], bool]) -> None:
        folder = self._folder
        if self._full or folder is None:
            return
        try:
            self._full = not write(folder)
        except OSError as error:
            self._full = True
            logger.error("the record cannot be written any more: %s", error.strerror)

    def _keep_failed(self, record: RequestRecord, entry: Ended) -> None:
        try:
            self._bundle(record, entry)
        except (OSError, RecordError) as error:
            logger.error("no bundle of failed request %s: %s", record.id, error)

    def _bundle(self, record: RequestRecord, entry: Ended) -> None:
        nbytes = sum(payload.nbytes for payload in (*record.media.values(), *_inputs(record).values()))
        if nbytes > self._settings.bundle_mb << 20:
            logger.warning("failed request %s is too large for a bundle (record.bundle_mb)", record.id)
            return
        self._failures += 1
        name = f"{self._failures:06d}-{_UNFIT.sub('_', record.id)[:_NAME_CHARS]}"
        header = header_of("bundle", self._config, self._started_s)
        failures = Path(self._settings.folder) / FAILURES
        bundle = RecordFolder(failures / name, header, 2 * self._settings.bundle_mb << 20)
        _write_beginning(bundle, record, 0.0)
        bundle.note(entry)
        bundle.close()
        for old in sorted(failures.iterdir())[: -self._settings.bundles]:
            shutil.rmtree(old)


def _write_beginning(folder: RecordFolder, record: RequestRecord, arrived_s: float) -> bool:
    inputs = {name: folder.keep(payload) for name, payload in _inputs(record).items()}
    media = {name: folder.keep(payload) for name, payload in record.media.items()}
    if None in (*inputs.values(), *media.values()):
        logger.error("the record ends here: its media have reached record.max_mb")
        return False
    return folder.note(
        Began(
            request=_without_owner(record.request),
            seed=record.seed,
            arrived_s=arrived_s,
            edges=[(edge.source, edge.target) for edge in record.edges],
            inputs={name: each for name, each in inputs.items() if each is not None},
            media={name: each for name, each in media.items() if each is not None},
        )
    )


def _without_owner(request: OmniRequest) -> OmniRequest:
    """Who asked derives from an API key and is not written down."""
    return msgspec.structs.replace(request, owner="")


def _inputs(record: RequestRecord) -> dict[str, MultimodalPayload]:
    return {item.port: item.payload for item in record.plan.inputs}
