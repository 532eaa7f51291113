"""Journals: bounded, readable up to where they were cut, and no entry of them can be changed unnoticed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from omnistage.payload import MultimodalPayload
from omnistage.runtime.journal import (
    Decoded,
    Dropped,
    Entry,
    GivenClock,
    Held,
    JournalName,
    JournalWriter,
    NotingClock,
    RecordError,
    read_journal,
)
from omnistage.runtime.journaled import DeliveredExecutor, digest_of

ENTRIES: list[Entry] = [Held("a", True, [1.5]), Decoded(2), Dropped("a", [0.1, 0.2])]


def written(file: Path, max_bytes: int = 1 << 20) -> list[bool]:
    writer: JournalWriter[Entry] = JournalWriter(file, max_bytes)
    fitted = [writer.write(entry) for entry in ENTRIES]
    writer.close()
    return fitted


def test_entries_come_back_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / JournalName("wave", 1, 2).file
    assert written(file) == [True] * 3
    assert list(read_journal(file, Entry)) == ENTRIES
    assert JournalName.of(file) == JournalName("wave", 1, 2)
    with pytest.raises(FileExistsError):
        written(file)


def test_full_journal_ends_before_the_entry_that_does_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "a-0-0.journal"
    assert written(file, 60) == [True, True, False]
    assert list(read_journal(file, Entry)) == ENTRIES[:2]
    assert file.stat().st_size <= 60


def test_full_disk_ends_the_record_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    writer: JournalWriter[Entry] = JournalWriter(Path("/dev/full"), 1 << 20, mode="wb")
    assert [writer.write(entry) for entry in ENTRIES] == [False] * 3
    assert [record.message for record in caplog.records] == ["record /dev/full ends here: No space left on device"]
    writer.close()


def test_entry_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a-0-0.journal"
    written(file)
    file.write_bytes(file.read_bytes()[:-3])
    assert list(read_journal(file, Entry)) == ENTRIES[:2]


@pytest.mark.parametrize("change", ["byte", "order", "name", "missing"])
def test_change_is_noticed_at_its_entry(tmp_path: Path, change: str) -> None:
    file = tmp_path / "a-0-0.journal"
    written(file)
    raw = file.read_bytes()
    first = 12 + int.from_bytes(raw[:4], "little")
    second = first + 12 + int.from_bytes(raw[first : first + 4], "little")
    changed = {
        "byte": raw[:-1] + bytes([raw[-1] ^ 1]),
        "order": raw[first:second] + raw[:first] + raw[second:],
        "name": raw,
        "missing": raw[:first] + raw[second:],
    }
    other = tmp_path / ("b-0-0.journal" if change == "name" else file.name)
    other.write_bytes(changed[change])
    entry = {"byte": 2, "order": 0, "name": 0, "missing": 1}[change]
    with pytest.raises(RecordError, match=f"entry {entry} was changed"):
        list(read_journal(other, Entry))


def test_clock_shows_what_the_other_one_noted() -> None:
    noting, given = NotingClock(), GivenClock()
    readings = [noting(), noting()]
    assert noting.take() == readings
    assert noting.take() == []
    given.give(readings)
    assert [given(), given(), given()] == [*readings, readings[-1]]
    assert len(given.take()) == 3


def test_work_beside_the_steps_ends_only_when_it_is_delivered_and_in_order() -> None:
    woken, gate = Event(), Event()
    executor = DeliveredExecutor(ThreadPoolExecutor(2), woken.set)
    slow = executor.submit(gate.wait, 5)
    quick = executor.submit(int, "no number")
    woken.wait(5)
    assert executor.ready() == 0
    gate.set()
    executor.deliver(1)
    assert (slow.done(), quick.done()) == (True, False)
    executor.deliver(1)
    with pytest.raises(ValueError, match="invalid literal"):
        quick.result()
    executor.shutdown()


def test_digest_depends_on_every_byte_name_and_shape() -> None:
    array = np.arange(6, dtype=np.float32)
    payloads = [
        MultimodalPayload.of(audio=array),
        MultimodalPayload.of(audio=array.reshape(2, 3)),
        MultimodalPayload.of(codes=array),
        MultimodalPayload.of({"rate": 1}, audio=array),
        MultimodalPayload.of(audio=array + 1),
        MultimodalPayload.of(audio=array.view(np.int32)),
        MultimodalPayload.text("x"),
        MultimodalPayload.of(audio=np.zeros((2, 0), np.float32)),
    ]
    assert len({digest_of(payload) for payload in payloads}) == len(payloads)
    assert digest_of(MultimodalPayload.of(audio=array[::2])) == digest_of(MultimodalPayload.of(audio=array[::2].copy()))
