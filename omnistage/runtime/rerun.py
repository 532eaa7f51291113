"""One life of one stage replica again, from its journal: the engine decides anew, and what it does is compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from omnistage.faults import Faults
from omnistage.messages import ChunkKey
from omnistage.ops.threads import use_threads
from omnistage.payload import MultimodalPayload, read_payload
from omnistage.runtime.journal import (
    Added,
    Decoded,
    Dropped,
    Entry,
    Fed,
    GivenClock,
    Held,
    JournalName,
    Stepped,
)
from omnistage.runtime.replica import EngineSetup
from omnistage.stages.base import InputChunk, StepOutput

# The engine's journal notes every exception, and what it notes is compared.
_NOTED = contextlib.suppress(Exception)


class Given(NamedTuple):
    """A chunk that a stage gave out. `key.source` is "stage.port"."""

    key: ChunkKey
    final: bool
    payload: MultimodalPayload


class Difference(msgspec.Struct, frozen=True):
    """The first thing that is not as recorded. `step` counts the steps of this life of the stage from 0."""

    stage: str
    step: int
    request: str
    what: str

    def __str__(self) -> str:
        return f"stage {self.stage}, step {self.step}, request {self.request or '-'}: {self.what}"


class Differs(Exception):
    """Carries a `Difference`."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


class StageRerun:
    """Applies a journal's entries in order. `threads` is how many the stage had."""

    def __init__(self, setup: EngineSetup, name: JournalName, entries: Iterator[Entry], threads: int) -> None:
        self.name = name
        self.steps = 0
        self._entries = entries
        self._next = next(entries, None)
        self._threads = threads
        self._clock = GivenClock()
        self._done: list[Entry] = []
        self._epochs: dict[str, int] = {}
        self._sent: dict[tuple[str, str], int] = {}
        use_threads(threads)
        stage = setup.config.stages[name.stage]
        first = [fault for fault in stage.faults if fault.action == "raise" and (fault.always or name.life == 0)]
        self._engine = setup.journaled(_no_wake, Faults(tuple(first)), self._done.append, clock=self._clock)

    @property
    def ended(self) -> bool:
        return self._next is None

    @property
    def waits_for(self) -> tuple[str, int, str, int] | None:
        """Request, epoch, port and seq of the chunk that the next entry feeds; None when it feeds none."""
        entry = self._next
        if not isinstance(entry, Fed):
            return None
        return entry.request, self._epochs[entry.request], entry.port, entry.seq

    def use(self) -> None:
        """Gives this stage the number of threads that it had; call it before a row of `apply`."""
        use_threads(self._threads)

    def apply(self, chunk: Given | None) -> tuple[Entry, list[Given]]:
        """The next entry, with the chunk that it feeds, and what the engine gave out. Raises Differs."""
        entry = self._next
        assert entry is not None, "the journal has ended"
        self._done.clear()
        if not isinstance(entry, Decoded):
            self._clock.give(entry.clock)
        given = self._act(entry, chunk)
        what, request = _difference(entry, self._done)
        if what:
            raise Differs(Difference(self.name.stage, self.steps, request, what))
        self.steps += isinstance(entry, Stepped)
        self._next = next(self._entries, None)
        return entry, given

    def _act(self, entry: Entry, chunk: Given | None) -> list[Given]:
        match entry:
            case Stepped():
                return self._step(entry)
            case Added():
                self._epochs[entry.request.request_id] = entry.request.epoch
                for key in [key for key in self._sent if key[0] == entry.request.request_id]:
                    del self._sent[key]
                with _NOTED:
                    self._engine.add(entry.request)
            case Fed():
                assert chunk is not None, "the caller looks at waits_for"
                with _NOTED:
                    self._engine.feed(_input(entry, chunk))
            case Dropped():
                self._engine.abort(entry.request)
            case Held():
                self._engine.hold(entry.request, entry.held)
            case Decoded():
                self._engine.decoded(entry.count)
        return []

    def _step(self, entry: Stepped) -> list[Given]:
        output = StepOutput()
        with _NOTED:
            output = self._engine.step(None if entry.only is None else frozenset(entry.only))
        given = list[Given]()
        for emission in output.emissions:
            place = (emission.request_id, emission.port)
            seq = self._sent.get(place, 0)
            self._sent[place] = seq + 1
            source = f"{self.name.stage}.{emission.port}"
            key = ChunkKey(emission.request_id, self._epochs[emission.request_id], source, seq)
            given.append(Given(key, emission.final, emission.payload))
        return given

    def close(self) -> None:
        self._engine.close()


def _no_wake() -> None:
    """Nobody waits in a replay."""


def _input(entry: Fed, chunk: Given) -> InputChunk:
    payload = copied(chunk.payload)
    return InputChunk(request_id=entry.request, port=entry.port, seq=entry.seq, final=chunk.final, payload=payload)


def copied(payload: MultimodalPayload) -> MultimodalPayload:
    """A payload as a reader in another process gets it: read-only arrays, plain metadata."""
    header, body = payload.packed()
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(header), type=type(header))
    return read_payload(plain, body)


def _difference(recorded: Entry, done: list[Entry]) -> tuple[str, str]:
    """What is not as recorded, and the request that it concerns; empty for nothing."""
    if not done:
        return "nothing was done", ""
    replayed = done[-1]
    if isinstance(recorded, Stepped) and isinstance(replayed, Stepped):
        return _step_difference(recorded, replayed)
    if isinstance(recorded, (Added, Fed)) and isinstance(replayed, (Added, Fed)) and recorded.error != replayed.error:
        request = recorded.request if isinstance(recorded, Fed) else recorded.request.request_id
        return f"{replayed.error or 'no error'} instead of {recorded.error or 'no error'}", request
    return ("the clock was read at other moments", "") if _readings(recorded) != _readings(replayed) else ("", "")


def _step_difference(recorded: Stepped, replayed: Stepped) -> tuple[str, str]:
    if recorded.error != replayed.error:
        return f"{replayed.error or 'no error'} instead of {recorded.error or 'no error'}", _first(recorded.batch)
    if (recorded.batch, recorded.rows) != (replayed.batch, replayed.rows):
        odd = [r for r in replayed.batch if r not in recorded.batch] or list(recorded.batch)
        return f"scheduled {_schedule(replayed)} instead of {_schedule(recorded)}", _first(odd)
    for before, after in zip(recorded.emitted, replayed.emitted, strict=False):
        if before != after:
            return f"gave other bytes for {before.port}: {after.digest} instead of {before.digest}", before.request
    if len(recorded.emitted) != len(replayed.emitted):
        more = max(recorded.emitted, replayed.emitted, key=len)[min(len(recorded.emitted), len(replayed.emitted))]
        return f"gave {len(replayed.emitted)} chunks instead of {len(recorded.emitted)}", more.request
    if recorded.finished != replayed.finished:
        return f"ended {replayed.finished} instead of {recorded.finished}", _first(recorded.batch)
    return ("the clock was read at other moments", "") if recorded.clock != replayed.clock else ("", "")


def _schedule(step: Stepped) -> str:
    rows = step.rows or (1,) * len(step.batch)
    return ", ".join(f"{request}:{count}" for request, count in zip(step.batch, rows, strict=True)) or "nobody"


def _first(requests: tuple[str, ...] | list[str]) -> str:
    return requests[0] if requests else ""


def _readings(entry: Entry) -> list[float]:
    return [] if isinstance(entry, Decoded) else entry.clock
