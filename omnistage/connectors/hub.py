"""The connectors of one producer or consumer: picks the transport by port when storing, by chunk when loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from omnistage.connectors.arena import Arena, ArenaView
from omnistage.connectors.base import OmniConnector
from omnistage.connectors.inline import InlineConnector, LocalStore
from omnistage.connectors.shm import ShmConnector
from omnistage.messages import Chunk, ChunkKey, Extent
from omnistage.payload import MultimodalPayload


class ConnectorHub:
    """`local` hands over inside the process, `remote` between processes. `inline_ports` are the output ports whose
    every reader lives in this process."""

    def __init__(self, local: OmniConnector, remote: OmniConnector, inline_ports: frozenset[str]) -> None:
        self._local = local
        self._remote = remote
        self._inline_ports = inline_ports

    def store(self, port: str, key: ChunkKey, final: bool, payload: MultimodalPayload) -> Chunk:
        connector = self._local if port in self._inline_ports else self._remote
        return connector.store(key, final, payload)

    def load(self, chunk: Chunk, on_release: Callable[[], None] | None = None) -> MultimodalPayload:
        connector = self._local if chunk.local else self._remote
        return connector.load(chunk, on_release)

    def release(self, key: ChunkKey) -> None:
        """Frees a stored payload; a key that is not held any more is ignored."""
        if not self._local.release(key):
            self._remote.release(key)

    def held(self) -> int:
        return self._local.held() + self._remote.held()

    def counters(self) -> dict[str, float]:
        return {"stored_chunks": self.held(), "spilled_chunks": self._local.spilled + self._remote.spilled}

    def close(self) -> None:
        """See `OmniConnector.close`."""
        self._local.close()
        self._remote.close()

    def check_integrity(self) -> None:
        self._local.check_integrity()
        self._remote.check_integrity()


def open_hub(
    replica: int,
    store: LocalStore,
    arena_fd: int,
    reads: Iterable[tuple[str, int, int]],
    inline_ports: frozenset[str],
    extents: Iterable[Extent] = (),
) -> ConnectorHub:
    """The hub of a producer with that index, over the arena in `arena_fd`. `reads` are (stage, index, arena descriptor)
    of the producers that it reads from; `extents` is what an earlier life of it left in its arena."""
    shm = ShmConnector(replica, Arena(arena_fd), {(stage, index): ArenaView(fd) for stage, index, fd in reads})
    shm.adopt(extents)
    return ConnectorHub(InlineConnector(store, replica), shm, inline_ports)
