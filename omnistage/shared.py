"""What the stages of one process build once and use together. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class SharedObjects:
    """Objects by key, each alive as long as a stage holds it. Thread-safe; one `build` runs at a time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._objects: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """The living object of that key, else what `build` makes. The key must tell all that `build` depends on."""
        with self._lock:
            found: T | None = self._objects.get(key)
            if found is None:
                found = self._objects[key] = build()
            return found

    def __len__(self) -> int:
        with self._lock:
            return len(self._objects)
