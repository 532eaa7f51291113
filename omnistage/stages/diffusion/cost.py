"""What a transformer call of so many rows costs, learnt from the calls themselves. Torch-free."""

from __future__ import annotations

import math
from bisect import bisect_left

# Buckets are half an octave of rows wide.
_PER_OCTAVE = 2
# A bucket follows its fastest call and forgets it by this factor per call, so that one stall does not count.
_FORGET = 1.02
_TRUSTED_CALLS = 3


class CostCurve:
    """Seconds of a call by its rows: piecewise linear through what was measured, proportional to rows beyond it.

    `points` ((rows, seconds), ...) are given measurements, later those in use, by rows. With none at all a row counts
    as one second, so that ratios are those of rows.
    """

    def __init__(self, points: tuple[tuple[int, float], ...] = ()) -> None:
        self._calls: dict[int, int] = {}
        self._rows: dict[int, int] = {}
        self._seconds: dict[int, float] = {}
        for rows, seconds in points:
            bucket = _bucket(rows)
            self._calls[bucket], self._rows[bucket], self._seconds[bucket] = _TRUSTED_CALLS, rows, seconds
        self.points: list[tuple[int, float]] = []
        self._refresh()

    def observe(self, rows: int, seconds: float) -> None:
        """Takes the duration of one call."""
        bucket = _bucket(rows)
        known = self._seconds.get(bucket)
        if known is None or seconds / rows <= known * _FORGET / self._rows[bucket]:
            self._rows[bucket], self._seconds[bucket] = rows, seconds
        else:
            self._seconds[bucket] = known * _FORGET
        self._calls[bucket] = self._calls.get(bucket, 0) + 1
        if self._calls[bucket] >= _TRUSTED_CALLS:
            self._refresh()

    def seconds(self, rows: int) -> float:
        """The expected duration of a call of `rows` rows."""
        points = self.points
        if not points:
            return float(rows)
        at = bisect_left(points, (rows, -math.inf))
        if at == len(points):
            last_rows, last = points[-1]
            return last * rows / last_rows
        right_rows, right = points[at]
        left_rows, left = points[at - 1] if at > 0 else (0, right)  # below the first point a call costs as much as it
        return left + (right - left) * (rows - left_rows) / (right_rows - left_rows)

    def _refresh(self) -> None:
        trusted = sorted(b for b, calls in self._calls.items() if calls >= _TRUSTED_CALLS)
        self.points = [(self._rows[b], self._seconds[b]) for b in trusted]


def _bucket(rows: int) -> int:
    return int(math.log2(rows) * _PER_OCTAVE)
