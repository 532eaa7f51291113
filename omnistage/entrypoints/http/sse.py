"""Server-sent events out of msgspec structs."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def json_bytes(value: msgspec.Struct) -> bytes:
    """A struct as JSON."""
    return _encoder.encode(value)


def event(value: msgspec.Struct) -> bytes:
    """A struct as one event; JSON holds no line breaks, so one data line is enough."""
    return b"data: " + _encoder.encode(value) + b"\n\n"
