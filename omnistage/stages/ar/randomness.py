"""Random numbers that depend on a request's seed and a position only, never on the batch. Torch-free."""

from __future__ import annotations

import struct
from hashlib import blake2b

_UNIT = 2.0**-53


def uniform(seed: int, position: int, stream: str = "") -> float:
    """A number in [0, 1) that is a fixed function of its arguments; `stream` names independent sequences of draws."""
    digest = blake2b(struct.pack("<qq", seed, position), digest_size=8, key=stream.encode()).digest()
    return (int.from_bytes(digest, "little") >> 11) * _UNIT
