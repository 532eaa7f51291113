"""Hand-off between processes of one host: small payloads in the message, large ones in the producer's arena."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from omnistage.connectors.arena import Arena, ArenaView
from omnistage.connectors.base import BODY_LIMIT, OmniConnector, decode_header, encode_header
from omnistage.errors import IntegrityError
from omnistage.messages import Chunk, ChunkKey, Extent
from omnistage.payload import MultimodalPayload, read_payload


class ShmConnector(OmniConnector):
    """`arena` is this producer's own; `views` maps (stage, replica) to the arenas it reads.

    When the arena has no room the bytes ride in the message, so a full arena slows a hand-off but never blocks it.
    """

    def __init__(self, replica: int, arena: Arena | None, views: dict[tuple[str, int], ArenaView]) -> None:
        self._replica = replica
        self._arena = arena
        self._views = views
        self._extents: dict[ChunkKey, int] = {}
        self._in_message: set[ChunkKey] = set()
        self.spilled = 0

    def adopt(self, extents: Iterable[Extent]) -> None:
        """Takes over what a previous incarnation of this replica left in the arena."""
        for extent in extents:
            if self._arena is not None:
                self._arena.reserve(extent.offset, extent.nbytes)
                self._extents[extent.key] = extent.offset

    def store(self, key: ChunkKey, final: bool, payload: MultimodalPayload) -> Chunk:
        header = payload.header()
        raw = encode_header(header)
        offset = self._allocate(header.nbytes) if header.nbytes > BODY_LIMIT else None
        if offset is None or self._arena is None:
            self._in_message.add(key)
            _, body = payload.packed()
            return Chunk(key, self._replica, final, raw, header.nbytes, body=body, sent_s=time.monotonic())
        payload.write(header, self._arena.view(offset, header.nbytes))
        self._extents[key] = offset
        return Chunk(key, self._replica, final, raw, header.nbytes, offset=offset, sent_s=time.monotonic())

    def _allocate(self, nbytes: int) -> int | None:
        offset = self._arena.allocate(nbytes) if self._arena is not None else None
        self.spilled += offset is None
        return offset

    def load(self, chunk: Chunk, on_release: Callable[[], None] | None = None) -> MultimodalPayload:
        if chunk.offset < 0:
            return read_payload(decode_header(chunk), chunk.body, on_release)
        stage = chunk.key.source.partition(".")[0]
        view = self._views[stage, chunk.replica].view(chunk.offset, chunk.nbytes)
        return read_payload(decode_header(chunk), view, on_release)

    def release(self, key: ChunkKey) -> bool:
        offset = self._extents.pop(key, None)
        if offset is not None and self._arena is not None:
            self._arena.free(offset)
            return True
        if key in self._in_message:
            self._in_message.discard(key)
            return True
        return False

    def held(self) -> int:
        return len(self._extents) + len(self._in_message)

    def close(self) -> None:
        for mapping in (self._arena, *self._views.values()):
            if mapping is not None:
                mapping.close()

    def check_integrity(self) -> None:
        if self._arena is None:
            return
        self._arena.check_integrity()
        if len(self._extents) == 0 and self._arena.used_bytes:
            raise IntegrityError("arena has extents in use that no chunk stands for")
