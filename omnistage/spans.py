"""Spans of time, taken down where they happen and bounded in number.

All times are seconds of the machine's monotonic clock, which its processes share.
"""

from __future__ import annotations

from array import array
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

Kind = Literal["front", "stage", "queue", "compute", "handoff", "decode", "encode", "wait"]
# float64 [n, 4]: start, end, busy seconds, count.
Rows = npt.NDArray[np.float64]


class SpanBlock(msgspec.Struct, frozen=True, array_like=True):
    """The spans of one kind and name, in order. `rows` are the bytes of `Rows`."""

    kind: Kind
    name: str
    rows: bytes


class VisitLog(msgspec.Struct, frozen=True, array_like=True):
    """What a stage took down of one request while it was there."""

    request_id: str
    blocks: list[SpanBlock]


class Span(msgspec.Struct, frozen=True):
    """One stretch of time of a request. `lane` is where: a stage, "server" (the front) or "client".

    `name` is the phase of a stage or the source of an edge, `seq` the number of the first chunk there (-1 for anything
    else). A span that stands for several has their `count`, and their summed length as `busy_s`.
    """

    kind: Kind
    lane: str
    name: str
    start_s: float
    end_s: float
    busy_s: float
    seq: int = -1
    count: int = 1


class Series:
    """Spans of one kind and name. When `limit` is reached, neighbours are joined two by two."""

    __slots__ = ("_joined", "_limit", "_raw", "_room")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._room = 2 * limit
        self._raw = array("d")
        self._joined: Rows = np.empty((0, 4))

    def add(self, start_s: float, end_s: float) -> None:
        raw = self._raw
        raw.append(start_s)
        raw.append(end_s)
        if len(raw) >= self._room:
            self._joined = joined(self.rows(), self._limit // 2)
            self._room = 2 * (self._limit - len(self._joined))
            self._raw = array("d")

    def rows(self) -> Rows:
        pairs = np.array(self._raw).reshape(-1, 2)
        lengths = pairs[:, 1:] - pairs[:, :1]
        return np.concatenate([self._joined, np.concatenate([pairs, lengths, np.ones_like(lengths)], axis=1)])


def joined(rows: Rows, limit: int) -> Rows:
    """At most `limit` rows (one at least) that stand for the same spans, neighbours joined two by two."""
    while len(rows) > max(1, limit):
        odd = rows[len(rows) & ~1 :]
        first, second = rows[0 : len(rows) & ~1 : 2], rows[1::2]
        pairs = np.stack(
            [
                np.minimum(first[:, 0], second[:, 0]),
                np.maximum(first[:, 1], second[:, 1]),
                first[:, 2] + second[:, 2],
                first[:, 3] + second[:, 3],
            ],
            axis=1,
        )
        rows = np.concatenate([pairs, odd])
    return rows


class SpanBook:
    """Takes spans down, at most `limit` of each kind and name."""

    __slots__ = ("_limit", "_series")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._series: dict[tuple[Kind, str], Series] = {}

    def add(self, kind: Kind, name: str, start_s: float, end_s: float) -> None:
        series = self._series.get((kind, name))
        if series is None:
            series = self._series[kind, name] = Series(self._limit)
        series.add(start_s, end_s)

    def blocks(self) -> list[SpanBlock]:
        return [SpanBlock(kind, name, series.rows().tobytes()) for (kind, name), series in list(self._series.items())]


def spans_of(lane: str, block: SpanBlock) -> list[Span]:
    """The spans of a block; those of hand-offs are numbered."""
    spans, seq = [], 0
    for start, end, busy, count in np.frombuffer(block.rows).reshape(-1, 4).tolist():
        number = seq if block.kind == "handoff" else -1
        spans.append(Span(block.kind, lane, block.name, start, end, busy, number, int(count)))
        seq += int(count)
    return spans
