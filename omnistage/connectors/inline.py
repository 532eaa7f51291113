"""Hand-off by reference between stages of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from omnistage.connectors.base import OmniConnector, encode_header
from omnistage.messages import Chunk, ChunkKey
from omnistage.payload import MultimodalPayload, PayloadHeader
from omnistage.shared import SharedObjects

_EMPTY_HEADER = encode_header(PayloadHeader((), {}, 0))


class LocalStore:
    """What the stages of one process share: the payloads they hold for each other, and `objects`. Thread-safe.

    `building` is held while a stage builds its engine: the loaders of model libraries are not made for two threads.
    """

    def __init__(self) -> None:
        self.building = threading.Lock()
        self.objects = SharedObjects()
        self._lock = threading.Lock()
        self._payloads: dict[ChunkKey, MultimodalPayload] = {}

    def put(self, key: ChunkKey, payload: MultimodalPayload) -> None:
        with self._lock:
            self._payloads[key] = payload

    def get(self, key: ChunkKey) -> MultimodalPayload:
        with self._lock:
            return self._payloads[key]

    def pop(self, key: ChunkKey) -> bool:
        with self._lock:
            return self._payloads.pop(key, None) is not None


class InlineConnector(OmniConnector):
    """The store is shared by all stages of the process; `replica` is this producer's index."""

    def __init__(self, store: LocalStore, replica: int) -> None:
        self._store = store
        self._replica = replica
        self._mine: set[ChunkKey] = set()
        self.spilled = 0

    def store(self, key: ChunkKey, final: bool, payload: MultimodalPayload) -> Chunk:
        self._store.put(key, payload)
        self._mine.add(key)
        return Chunk(key, self._replica, final, _EMPTY_HEADER, payload.nbytes, local=True, sent_s=time.monotonic())

    def load(self, chunk: Chunk, on_release: Callable[[], None] | None = None) -> MultimodalPayload:
        """A fresh payload over the producer's arrays, so that it can be released on its own."""
        stored = self._store.get(chunk.key)
        return MultimodalPayload(stored.tensors, stored.meta, on_release)

    def release(self, key: ChunkKey) -> bool:
        if key not in self._mine:
            return False
        self._mine.discard(key)
        return self._store.pop(key)

    def held(self) -> int:
        return len(self._mine)

    def close(self) -> None:
        """The store belongs to the process."""

    def check_integrity(self) -> None:
        """Nothing to count beyond `held`."""
