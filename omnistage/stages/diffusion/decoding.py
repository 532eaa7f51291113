"""The decode thread's queue: requests that are through with denoising, and previews of those that are not.

One call runs at a time. Its exception stays in its future until the stage loop steps the request at fault; a failed
batch is first repeated request by request, so that only the culprit fails.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, NamedTuple, TypeVar

from omnistage.stages.diffusion.entry import Entry
from omnistage.stages.diffusion.model import DiffusionModel, Preview, Produced

S = TypeVar("S")


class DecodeResult(NamedTuple, Generic[S]):
    """What one call produced for one request, when (the clock's seconds), and its share of the thread's time (the
    whole call, in seconds)."""

    entry: Entry[S]
    produced: list[Produced]
    start_s: float
    seconds: float
    is_preview: bool


class _Timed(NamedTuple):
    produced: list[list[Produced]]
    start_s: float
    seconds: float


class _Call(NamedTuple, Generic[S]):
    entries: list[Entry[S]]
    future: Future[_Timed]
    is_preview: bool


class DecodeQueue(Generic[S]):
    """Owned by the stage's thread; only `_run` works on the decode thread."""

    def __init__(
        self,
        model: DiffusionModel[S],
        executor: Executor,
        wake: Callable[[], None],
        *,
        clock: Callable[[], float],
        max_batch: int,
    ) -> None:
        self._model = model
        self._executor = executor
        self._wake = wake
        self._clock = clock
        self._max_batch = max_batch
        self._queue: dict[str, Entry[S]] = {}
        self._previews: list[tuple[Entry[S], Preview]] = []
        self._call: _Call[S] | None = None

    def add(self, entry: Entry[S]) -> None:
        """Takes a request that has no steps left; it stays until it is dropped."""
        self._queue[entry.id] = entry

    def preview(self, entry: Entry[S], preview: Preview) -> None:
        """Queues a preview; an older one of the same request that has not started is replaced."""
        self._previews = [item for item in self._previews if item[0] is not entry]
        self._previews.append((entry, preview))

    def drop(self, entry: Entry[S]) -> None:
        """Forgets a request. Its state is closed now, or when the call that holds it ends."""
        self._queue.pop(entry.id, None)
        self._previews = [item for item in self._previews if item[0] is not entry]
        entry.closed = True
        if entry.using == 0:
            self._model.close(entry.state)

    def has_work(self) -> bool:
        """True when a call has ended or one could start now."""
        if self._call is not None:
            return self._call.future.done()
        return bool(self._previews) or any(not entry.held for entry in self._queue.values())

    def pending(self) -> int:
        return len(self._queue)

    def ids(self) -> frozenset[str]:
        return frozenset(self._queue)

    def raise_failed(self, only: frozenset[str] | None) -> None:
        """Raises the exception of a failed call of one request (of `only`, if given); splits up a failed batch."""
        call = self._call
        if call is None or not call.future.done() or call.future.exception() is None:
            return
        live = [entry for entry in call.entries if not entry.closed]
        if len(call.entries) == 1 and live and (only is None or live[0].id in only):
            call.future.result()
        if len(call.entries) > 1 or not live:
            for entry in live:
                entry.alone = True
            self._end_call(call)

    def collect(self, only: frozenset[str] | None) -> list[DecodeResult[S]]:
        """Results of the call that has ended, if any. With `only`, calls for other requests are left for later."""
        call = self._call
        if call is None or not call.future.done() or call.future.exception() is not None:
            return []
        if only is not None and not only.issuperset(entry.id for entry in call.entries):
            return []
        timed = call.future.result()
        self._end_call(call)
        pairs = zip(call.entries, timed.produced, strict=True)
        times = (timed.start_s, timed.seconds)
        return [DecodeResult(e, made, *times, call.is_preview) for e, made in pairs if not e.closed]

    def submit(self, only: frozenset[str] | None = None) -> None:
        """Starts the next call if none runs: finished requests first, then previews."""
        if self._call is not None:
            return
        batch = self._next_batch(only)
        if batch:
            states = [entry.state for entry in batch]
            self._start(batch, lambda: self._model.decode(states), is_preview=False)
        elif self._previews:
            entry, preview = self._previews.pop(0)
            self._start([entry], lambda: [[preview()]], is_preview=True)

    def close(self) -> None:
        """Closes what an ended call still held; the executor must be shut down before."""
        if self._call is not None:
            self._end_call(self._call)

    def _next_batch(self, only: frozenset[str] | None) -> list[Entry[S]]:
        able = [e for e in self._queue.values() if not e.held and (only is None or e.id in only)]
        able.sort(key=lambda entry: -entry.request.priority)
        if not able or able[0].alone or self._max_batch == 1:
            return able[:1]
        group = self._model.decode_group(able[0].state)
        mates = [e for e in able if not e.alone and self._model.decode_group(e.state) == group]
        return mates[: self._max_batch]

    def _start(self, entries: list[Entry[S]], work: Callable[[], list[list[Produced]]], *, is_preview: bool) -> None:
        for entry in entries:
            entry.using += 1
        future = self._executor.submit(self._run, work)
        self._call = _Call(entries, future, is_preview)
        future.add_done_callback(lambda _: self._wake())

    def _run(self, work: Callable[[], list[list[Produced]]]) -> _Timed:
        start = self._clock()
        produced = work()
        return _Timed(produced, start, self._clock() - start)

    def _end_call(self, call: _Call[S]) -> None:
        self._call = None
        for entry in call.entries:
            entry.using -= 1
            if entry.closed and entry.using == 0:
                self._model.close(entry.state)
