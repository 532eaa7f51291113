"""The store of what spoken answers said is bounded and forgets."""

from __future__ import annotations

import time

import pytest

from omnistage.entrypoints.http.transcripts import CAPACITY, LIFETIME_S, MAX_CHARS, TranscriptStore


def test_least_recently_used_goes_first() -> None:
    store = TranscriptStore()
    for index in range(CAPACITY):
        store.keep(f"a{index}", "x")
    assert store.find("a0") == "x"
    store.keep("new", "y")
    assert store.find("a1") is None
    assert store.find("a0") == "x"


def test_characters_are_bounded() -> None:
    store = TranscriptStore()
    for index in range(5):
        store.keep(f"a{index}", "x" * (MAX_CHARS // 2))
    assert [store.find(f"a{index}") is not None for index in range(5)] == [False, False, False, True, True]
    store.keep("huge", "x" * (MAX_CHARS + 1))
    assert store.find("huge") is None
    assert store.find("a4") is not None


def test_entries_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = TranscriptStore()
    store.keep("a", "x")
    now += LIFETIME_S - 1
    assert store.find("a") == "x"
    now += 2
    assert store.find("a") is None
