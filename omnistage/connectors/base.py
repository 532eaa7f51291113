"""OmniConnector: moves payload bytes between replicas. It never decides where they go.

The producer's side stores a payload and describes it in a `Chunk`; the consumer's side turns the chunk back into a
payload of views. A stored payload stays until `release(key)`. Which connector stores it depends on the port (`hub`);
payloads up to `BODY_LIMIT` ride in the message between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from omnistage.messages import Chunk, ChunkKey
from omnistage.payload import MultimodalPayload, PayloadHeader

BODY_LIMIT = 16 << 10

_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(PayloadHeader).decode


def encode_header(header: PayloadHeader) -> msgspec.Raw:
    return msgspec.Raw(_encode(header))


def decode_header(chunk: Chunk) -> PayloadHeader:
    """Raises msgspec.DecodeError when the bytes are not a payload header."""
    return _decode_header(chunk.header)


class OmniConnector(Protocol):
    """Both sides of one transport, as one process sees it. `spilled` counts payloads that found no room of their
    own."""

    spilled: int

    def store(self, key: ChunkKey, final: bool, payload: MultimodalPayload) -> Chunk:
        """Stores a payload and describes it."""
        ...

    def load(self, chunk: Chunk, on_release: Callable[[], None] | None = None) -> MultimodalPayload:
        """The payload of a chunk that this transport stored, as views where possible."""
        ...

    def release(self, key: ChunkKey) -> bool:
        """Frees a stored payload; False when this transport does not hold it."""
        ...

    def held(self) -> int:
        """Payloads stored and not released."""
        ...

    def close(self) -> None:
        """Lets go of what is mapped; nothing may be stored or loaded afterwards."""
        ...

    def check_integrity(self) -> None: ...
