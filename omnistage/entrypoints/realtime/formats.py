"""Audio on the wire of a realtime session: 16-bit PCM at 24 kHz, or G.711 at 8 kHz, always one channel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from omnistage.errors import RequestError
from omnistage.media.audio_encode import PCM_RATE
from omnistage.media.g711 import G711_RATE, Law, g711_decode, g711_encode
from omnistage.media.samples import FloatAudio, Resampler, to_s16le

FormatName = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
_LAWS: dict[str, Law] = {"audio/pcmu": "mu", "audio/pcma": "a"}


class WireFormat(msgspec.Struct, frozen=True):
    """Samples at `rate` Hz as bytes. `decode` gives float32 [1, samples] and raises RequestError for a part of a
    sample."""

    rate: int
    decode: Callable[[bytes], FloatAudio]
    encode: Callable[[FloatAudio], bytes]


def wire_format(name: FormatName) -> WireFormat:
    law = _LAWS.get(name)
    if law is None:
        return WireFormat(PCM_RATE, _from_s16le, to_s16le)
    return WireFormat(G711_RATE, partial(g711_decode, law), partial(g711_encode, law))


def _from_s16le(data: bytes) -> FloatAudio:
    if len(data) % 2:
        raise RequestError("audio: 16-bit samples come in whole pairs of bytes", param="audio")
    return (np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768.0))[None]


def format_fields(name: FormatName) -> dict[str, Any]:
    """The format as OpenAI writes it."""
    return {"type": name, "rate": PCM_RATE} if name == "audio/pcm" else {"type": name}


class OutputAudio:
    """Turns a response's samples into wire bytes as they come. `samples` counts what was sent, at `format.rate`."""

    def __init__(self, fmt: WireFormat) -> None:
        self.format = fmt
        self.samples = 0
        self._resampler: Resampler | None = None

    @property
    def milliseconds(self) -> int:
        return self.samples * 1000 // self.format.rate

    def feed(self, samples: FloatAudio, rate: int) -> bytes:
        """float32 [channels, samples] at `rate` Hz; several channels are mixed to one."""
        if self._resampler is None:
            self._resampler = Resampler(rate, self.format.rate, 1)
        return self._wire(self._resampler.feed(samples.mean(axis=0, keepdims=True)))

    def finish(self) -> bytes:
        """What the resampler still holds."""
        if self._resampler is None:
            return b""
        return self._wire(self._resampler.flush())

    def _wire(self, samples: FloatAudio) -> bytes:
        self.samples += samples.shape[1]
        return self.format.encode(samples)
