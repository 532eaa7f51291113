"""Sample arithmetic: streaming resampling and 16-bit conversion. Audio is float32 [channels, samples] in -1..1."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import soxr

FloatAudio = npt.NDArray[np.float32]


def to_s16le(samples: FloatAudio) -> bytes:
    """Interleaved little-endian 16-bit samples; values beyond -1..1 are clipped, NaN becomes silence."""
    scaled = np.rint(np.clip(np.nan_to_num(samples), -1.0, 1.0) * np.float32(32767.0))
    interleaved: bytes = scaled.T.astype("<i2").tobytes()
    return interleaved


class Resampler:
    """Converts a stream from one sample rate (Hz) to another with carried filter state.

    The concatenation of the pieces equals the conversion of the whole, whatever the chunking.
    """

    def __init__(self, source_rate: int, target_rate: int, channels: int) -> None:
        self.channels = channels
        self._stream: Any = None
        if source_rate != target_rate:
            self._stream = soxr.ResampleStream(source_rate, target_rate, channels, dtype="float32", quality="HQ")

    def feed(self, samples: FloatAudio, last: bool = False) -> FloatAudio:
        """float32 [channels, samples] in, float32 [channels, m] out; `last` flushes the filter."""
        if self._stream is None:
            return samples
        piece = np.ascontiguousarray(samples.T, dtype=np.float32)
        converted = self._stream.resample_chunk(piece, last=last)
        return np.ascontiguousarray(converted.reshape(-1, self.channels).T)

    def flush(self) -> FloatAudio:
        """What the filter still holds at the end of the stream."""
        return self.feed(np.zeros((self.channels, 0), np.float32), last=True)
