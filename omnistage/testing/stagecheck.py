"""`check_stage`: proves for a stage of one's own what the runtime promises of every stage."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import msgspec
import numpy as np

from omnistage.errors import StageError
from omnistage.kit.ports import Value
from omnistage.kit.stage import Stage
from omnistage.testing.stagebench import POISON_SEED, Bench, Example, Heard

TOLERANCE = 1e-5


class BrokenPromise(AssertionError):
    """A promise that a stage does not keep; the text begins with its name."""


def check_stage(stage: Stage, examples: Sequence[Example | Mapping[str, Any]], limit_s: float = 60.0) -> None:
    """Raises BrokenPromise naming the promise, the example and what differs. `examples`, at least two that differ, are
    inputs by port (or `Example`s, with parameters and seed), best of several chunks each.

    Promises: *ports* (types, shapes and names as declared, no NaN), *hand-over* (inputs are not changed, nor is later
    what was given out), *progress* (all checks together take at most `limit_s` seconds),
    *replay* (the same request gives the same bytes, in a new process too), *streaming* (chunked equals whole),
    *batching* (together equals alone), *order* (nor does it matter who comes first), *abort* (others go on, nothing is
    left), *isolation* (a bad request fails, others do not notice). Floats may differ by 1e-5 where sums may be taken
    in another order; all else is exact.
    """
    asked = [each if isinstance(each, Example) else Example(inputs=each) for each in examples]
    if len(asked) < 2:
        raise ValueError("give at least two examples that differ")
    apart = ThreadPool(1)  # a daemon thread: code that never returns keeps nobody from leaving
    try:
        apart.apply_async(_check, (stage, asked)).get(limit_s)
    except multiprocessing.TimeoutError:
        raise BrokenPromise(f"progress: a call has not returned, or the checks need more than {limit_s} s") from None
    finally:
        apart.terminate()


def _check(stage: Stage, asked: list[Example]) -> None:
    threads = threading.active_count()
    alone = _check_alone(stage, asked)
    _check_replay(stage, asked, alone)
    _check_streaming(stage, asked, alone)
    _check_together(stage, asked, alone)
    _check_abort(stage, asked, alone)
    _check_isolation(stage, asked, alone)
    if threading.active_count() > threads:
        raise BrokenPromise("abort: threads that the stage started go on when all requests are over")


def _check_alone(stage: Stage, asked: list[Example]) -> list[Heard]:
    bench = Bench(stage)
    alone = bench.alone(asked)
    for index, heard in enumerate(alone):
        if isinstance(heard.error, StageError):
            raise BrokenPromise(f"ports: example {index}: {heard.error}")
        if heard.error is not None and "read-only" in str(heard.error):
            raise BrokenPromise(f"hand-over: example {index}: the stage writes into its input, which others read too")
        if heard.error is not None:
            raise BrokenPromise(f"ports: example {index} fails: {type(heard.error).__name__}: {heard.error}")
        if heard.closed != stage.gives.keys():
            raise BrokenPromise(f"ports: example {index}: {sorted(stage.gives.keys() - heard.closed)} never ends")
        for name in stage.gives:
            if any(not isinstance(piece, str) and np.any(piece != piece) for piece in heard.pieces[name]):
                raise BrokenPromise(f"ports: example {index}: output {name} holds NaN")
    if bench.watched.wrote:
        raise BrokenPromise("hand-over: the stage writes into its input, which is read again when others fail")
    if bench.changed:
        raise BrokenPromise("hand-over: an array that was given out is changed later; return a new one in each call")
    return alone


def _check_replay(stage: Stage, asked: list[Example], alone: list[Heard]) -> None:
    bench = Bench(stage)
    for _ in range(2):
        for index, (first, again) in enumerate(zip(alone, bench.alone(asked), strict=True)):
            text = _difference(stage, first, again, exact=True)
            if text:
                why = "chance beside part.rng, the time, or what the stage keeps outside part.state"
                raise BrokenPromise(f"replay: example {index} asked again: {text} ({why})")


def _check_streaming(stage: Stage, asked: list[Example], alone: list[Heard]) -> None:
    ways: list[tuple[str, dict[str, Any], int | None]] = [("fed piece by piece", {}, 1)]
    if stage.paced is not None:
        sizes = {0, max(1, stage.chunk // 2), 2 * stage.chunk + 1} - {stage.chunk}
        ways += [(f"in chunks of {size}" if size else "whole", {"chunk": size}, None) for size in sorted(sizes)]
    for way, overrides, piece in ways:
        heard = Bench(stage, **overrides).alone(asked, piece)
        _compare("streaming", stage, alone, heard, way)


def _check_together(stage: Stage, asked: list[Example], alone: list[Heard]) -> None:
    bench = Bench(stage)
    _compare("batching", stage, alone, bench.together(asked), "together with the others")
    _compare("batching", stage, alone, bench.together(asked, 3), "fed in turns with the others")
    if bench.failed_together is not None:
        raise BrokenPromise(f"batching: requests fail together that do not fail alone: {bench.failed_together}")
    backwards = list(reversed(bench.together(list(reversed(asked)))))
    _compare("order", stage, alone, backwards, "when the others come in another order")
    if bench.changed:
        raise BrokenPromise("hand-over: an array that was given out is changed when others are served")


def _check_abort(stage: Stage, asked: list[Example], alone: list[Heard]) -> None:
    bench = Bench(stage)
    for steps in (0, 1):
        heard = bench.together([asked[0], *asked], 2, abort_first_after=steps)
        _compare("abort", stage, alone, heard[1:], "when another request is aborted")
    if bench.engine.request_ids():
        raise BrokenPromise(f"abort: {len(bench.engine.request_ids())} requests never end")
    bench.engine.check_integrity()
    alive = bench.watched.alive()
    if alive:
        raise BrokenPromise(f"abort: the stage still holds {alive} parts or states of requests that are over")


def _check_isolation(stage: Stage, asked: list[Example], alone: list[Heard]) -> None:
    bad = msgspec.structs.replace(asked[0], seed=POISON_SEED)
    for place in (0, len(asked)):
        bench = Bench(stage)
        heard = bench.together([*asked[:place], bad, *asked[place:]])
        if heard[place].error is None:
            raise BrokenPromise("isolation: a request whose input raises when it is read ends without an error")
        _compare("isolation", stage, alone, heard[:place] + heard[place + 1 :], "beside a request that fails")


def _compare(promise: str, stage: Stage, expected: list[Heard], found: list[Heard], way: str) -> None:
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        text = _difference(stage, one, other, exact=False)
        if text:
            raise BrokenPromise(f"{promise}: example {index} {way}: {text}")


def _difference(stage: Stage, expected: Heard, found: Heard, *, exact: bool) -> str:
    if found.error is not None:
        return f"fails with {type(found.error).__name__}: {found.error}"
    for name, port in stage.gives.items():
        one, other = (port.join(heard.pieces[name]) for heard in (expected, found))
        text = _unlike(one, other, exact=exact)
        if text:
            return f"output {name} {text}"
    return ""


def _unlike(one: Value, other: Value, *, exact: bool) -> str:
    if isinstance(one, str) or isinstance(other, str):
        return "" if one == other else f"is {str(other)[:40]!r} instead of {str(one)[:40]!r}"
    if one.shape != other.shape:
        return f"has shape {other.shape} instead of {one.shape}"
    if exact or not np.issubdtype(one.dtype, np.floating):
        return "" if np.array_equal(one, other) else "has other values"
    worst = float(np.max(np.abs(one - other), initial=0.0))
    return "" if worst <= TOLERANCE else f"differs by up to {worst:.3g}"
