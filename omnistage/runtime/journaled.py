"""A stage engine whose every call is noted, and the executor that makes ends of work beside the steps part of them."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from omnistage.errors import OmniError
from omnistage.payload import MultimodalPayload
from omnistage.runtime.journal import (
    DIGEST_BYTES,
    Added,
    Decoded,
    Dropped,
    Emitted,
    Entry,
    Fed,
    Held,
    Stepped,
)
from omnistage.stages.base import Emission, InputChunk, StageEngine, StageRequest, StepOutput

T = TypeVar("T")


class KeptReadings(Protocol):
    """A clock (seconds) that keeps what was read of it."""

    def __call__(self) -> float: ...

    def take(self) -> list[float]: ...


class DeliveredExecutor(Executor):
    """Runs calls elsewhere; their futures end only in `deliver`, which the stage's thread calls.

    `wake` is called from any thread when there is something to deliver.
    """

    def __init__(self, inner: Executor, wake: Callable[[], None]) -> None:
        self._inner = inner
        self._wake = wake
        self._pending: deque[tuple[Future[Any], Future[Any]]] = deque()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        outer, inner = Future[T](), self._inner.submit(fn, *args, **kwargs)
        self._pending.append((outer, inner))
        inner.add_done_callback(lambda _: self._wake())
        return outer

    def ready(self) -> int:
        """How many calls, counted from the oldest, have ended."""
        count = 0
        for _, inner in self._pending:
            if not inner.done():
                break
            count += 1
        return count

    def deliver(self, count: int) -> None:
        """Ends the futures of the oldest calls, waiting for them."""
        for _ in range(min(count, len(self._pending))):
            outer, inner = self._pending.popleft()
            error = inner.exception()
            if error is not None:
                outer.set_exception(error)
            else:
                outer.set_result(inner.result())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._inner.shutdown(wait=wait, cancel_futures=cancel_futures)


class JournaledEngine:
    """A `StageEngine` that tells `note` of every call, after it. Names of owners are replaced by numbers.

    Work beside the steps ends before a step, all of it that is through; with `delivers` False only in `decoded`.
    """

    def __init__(
        self,
        inner: StageEngine,
        note: Callable[[Entry], object],
        clock: KeptReadings,
        executor: DeliveredExecutor,
        *,
        delivers: bool = True,
    ) -> None:
        self._inner = inner
        self._note = note
        self._clock = clock
        self._executor = executor
        self._delivers = delivers
        self._owners: dict[str, str] = {"": ""}

    def add(self, request: StageRequest) -> None:
        owner = self._owners.setdefault(request.cache_salt, f"owner-{len(self._owners)}")
        known = msgspec.structs.replace(request, cache_salt=owner)
        with self._noted(lambda error: Added(known, error, self._clock.take())):
            self._inner.add(request)

    def feed(self, chunk: InputChunk) -> None:
        with self._noted(lambda error: Fed(chunk.request_id, chunk.port, chunk.seq, error, self._clock.take())):
            self._inner.feed(chunk)

    @contextmanager
    def _noted(self, entry: Callable[[str], Entry]) -> Iterator[None]:
        """Notes a call when it ends, with the text of what it raised ("" for nothing)."""
        error = ""
        try:
            yield
        except Exception as raised:
            error = text_of(raised)
            raise
        finally:
            self._note(entry(error))

    def abort(self, request_id: str) -> None:
        self._inner.abort(request_id)
        self._note(Dropped(request_id, self._clock.take()))

    def hold(self, request_id: str, held: bool) -> None:
        self._inner.hold(request_id, held)
        self._note(Held(request_id, held, self._clock.take()))

    def decoded(self, count: int) -> None:
        """Lets so many calls beside the steps end, waiting for them."""
        self._executor.deliver(count)
        self._note(Decoded(count))

    def has_work(self) -> bool:
        return self._inner.has_work() or self._executor.ready() > 0

    def step(self, only: frozenset[str] | None = None) -> StepOutput:
        ready = self._executor.ready() if self._delivers else 0
        if ready:
            self.decoded(ready)
        among = None if only is None else tuple(sorted(only))
        try:
            output = self._inner.step(only)
        except Exception as raised:
            self._note(Stepped(among, error=text_of(raised), clock=self._clock.take()))
            raise
        self._note(
            Stepped(
                among,
                output.batch,
                output.rows,
                tuple([_emitted(emission) for emission in output.emissions]),
                tuple([(end.request_id, end.reason.value) for end in output.finished]),
                clock=self._clock.take(),
            )
        )
        return output

    def request_ids(self) -> frozenset[str]:
        return self._inner.request_ids()

    def counters(self) -> dict[str, float]:
        return self._inner.counters()

    def check_integrity(self) -> None:
        self._inner.check_integrity()

    def close(self) -> None:
        self._inner.close()


def text_of(error: Exception) -> str:
    """What is compared of an exception: its type, and its text where that is meant for users."""
    return f"{type(error).__name__}: {error}" if isinstance(error, OmniError) else type(error).__name__


def _emitted(emission: Emission) -> Emitted:
    return Emitted(emission.request_id, emission.port, emission.final, digest_of(emission.payload))


def digest_of(payload: MultimodalPayload) -> str:
    """A hash of all that a payload holds, in hexadecimal digits."""
    digest = hashlib.blake2b(msgspec.msgpack.encode(payload.header()), digest_size=DIGEST_BYTES)
    for tensor in payload.tensors.values():
        digest.update(np.ascontiguousarray(tensor.array).data)
    return digest.hexdigest()
