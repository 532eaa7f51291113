"""The connectors of one producer or consumer: picks the transport by port when storing, by chunk when loading."""

from __future__ import annotations

from collections.abc import Callable

from omnistage.connectors.inline import InlineConnector
from omnistage.connectors.shm import ShmConnector
from omnistage.messages import Chunk, ChunkKey
from omnistage.payload import MultimodalPayload


class ConnectorHub:
    """`inline_ports` are the output ports whose every reader lives in this process."""

    def __init__(self, inline: InlineConnector, shm: ShmConnector, inline_ports: frozenset[str]) -> None:
        self._inline = inline
        self._shm = shm
        self._inline_ports = inline_ports

    def store(self, port: str, key: ChunkKey, final: bool, payload: MultimodalPayload) -> Chunk:
        connector = self._inline if port in self._inline_ports else self._shm
        return connector.store(key, final, payload)

    def load(self, chunk: Chunk, on_release: Callable[[], None] | None = None) -> MultimodalPayload:
        connector = self._inline if chunk.local else self._shm
        return connector.load(chunk, on_release)

    def release(self, key: ChunkKey) -> None:
        """Frees a stored payload; a key that is not held any more is ignored."""
        if not self._inline.release(key):
            self._shm.release(key)

    def held(self) -> int:
        return self._inline.held() + self._shm.held()

    def counters(self) -> dict[str, float]:
        return {"stored_chunks": self.held(), "spilled_chunks": self._shm.spilled}

    def close(self) -> None:
        """Unmaps the arenas; nothing may be stored or loaded afterwards."""
        self._shm.close()

    def check_integrity(self) -> None:
        self._shm.check_integrity()
