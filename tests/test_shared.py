"""Objects that stages of one process have in common."""

import threading

from omnistage.shared import SharedObjects


class Thing:
    """Something that can be referred to weakly."""


def test_one_object_per_key_while_somebody_holds_it() -> None:
    shared = SharedObjects()
    first = shared.get("a", Thing)
    assert shared.get("a", Thing) is first
    assert shared.get("b", Thing) is not first
    assert len(shared) == 1
    del first
    assert len(shared) == 0


def test_threads_that_ask_at_once_get_the_same_object() -> None:
    shared, gate, found = SharedObjects(), threading.Barrier(4), list[Thing]()

    def ask() -> None:
        gate.wait()
        found.append(shared.get("a", Thing))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
