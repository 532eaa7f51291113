"""Hashes of what a client gets of an answer, whichever way it is cut into chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from omnistage.engine.record_files import Part
from omnistage.payload import MultimodalPayload
from omnistage.runtime.journal import DIGEST_BYTES

Place = tuple[str, str]


class AnswerHash:
    """Takes the pieces of one answer, per output port; with `limits` only the first so many bytes of each part."""

    def __init__(self, limits: Mapping[Place, int] | None = None) -> None:
        self._limits = limits
        self._hashes: dict[Place, hashlib.blake2b] = {}
        self._sizes: dict[Place, int] = {}

    def take(self, source: str, text: str, token_ids: tuple[int, ...], payload: MultimodalPayload | None) -> None:
        """One more chunk of a port ("stage.port")."""
        for name, raw in _pieces(text, token_ids, payload):
            self._feed((source, name), raw)

    def _feed(self, place: Place, raw: bytes) -> None:
        size = self._sizes.get(place, 0)
        if self._limits is not None:
            raw = raw[: max(0, self._limits.get(place, 0) - size)]
        if raw:
            self._hashes.setdefault(place, hashlib.blake2b(digest_size=DIGEST_BYTES)).update(raw)
            self._sizes[place] = size + len(raw)

    def parts(self) -> list[Part]:
        places = sorted(self._hashes)
        return [Part(*place, self._sizes[place], self._hashes[place].hexdigest()) for place in places]


def _pieces(text: str, token_ids: tuple[int, ...], payload: MultimodalPayload | None) -> Iterator[tuple[str, bytes]]:
    """The parts of a chunk as bytes; sound goes sample by sample, so that chunks of it follow each other."""
    yield "text", text.encode("utf-8", "surrogatepass")
    yield "token_ids", np.array(token_ids, np.int64).tobytes()
    for name, tensor in payload.tensors.items() if payload is not None else ():
        array = tensor.array
        yield name, (array.T if name == "audio" else array).tobytes()
