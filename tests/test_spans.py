"""Spans stay bounded, and joining them loses no time."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.spans import SpanBook, joined, spans_of


def test_full_series_joins_neighbours_and_loses_no_time() -> None:
    book = SpanBook(64)
    for i in range(501):
        book.add("handoff", "a", i, i + 0.5)
    (block,) = book.blocks()
    spans = spans_of("lane", block)
    assert len(spans) <= 64
    assert sum(span.count for span in spans) == 501
    assert sum(span.busy_s for span in spans) == pytest.approx(250.5)
    assert (spans[0].start_s, spans[-1].end_s) == (0, 500.5)
    assert [span.seq for span in spans] == [int(span.start_s) for span in spans]


def test_kinds_and_names_are_kept_apart_and_few_spans_stay_as_they_are() -> None:
    book = SpanBook(64)
    book.add("compute", "decode", 1.0, 2.0)
    book.add("handoff", "decode", 1.5, 2.0)
    book.add("compute", "decode", 3.0, 4.0)
    spans = [(s.kind, s.start_s, s.busy_s, s.seq, s.count) for block in book.blocks() for s in spans_of("x", block)]
    assert spans == [("compute", 1.0, 1.0, -1, 1), ("compute", 3.0, 1.0, -1, 1), ("handoff", 1.5, 0.5, 0, 1)]


@pytest.mark.parametrize("limit", [0, 1])
def test_joining_ends_with_one_row(limit: int) -> None:
    rows = np.array([[i, i + 1, 1.0, 1.0] for i in range(7)])
    np.testing.assert_array_equal(joined(rows, limit), [[0, 7, 7, 7]])
