"""Telephone audio: the mu-law and A-law of ITU-T G.711, one byte per sample."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from omnistage.media.samples import FloatAudio

G711_RATE = 8_000
Law = Literal["mu", "a"]

_Codes = npt.NDArray[np.uint8]
_Levels = npt.NDArray[np.int32]


def _mu_levels() -> _Levels:
    """int32 [256]: the 16-bit level of each mu-law code (14-bit law, scaled by 4)."""
    code = ~np.arange(256, dtype=np.int32) & 0xFF
    size = ((((code & 0x0F) << 3) + 0x84) << ((code & 0x70) >> 4)) - 0x84
    return np.where(code & 0x80, -size, size)


def _a_levels() -> _Levels:
    """int32 [256]: the 16-bit level of each A-law code (13-bit law, scaled by 8)."""
    code = np.arange(256, dtype=np.int32) ^ 0x55
    segment = (code & 0x70) >> 4
    step = ((code & 0x0F) << 4) + 8
    size = np.where(segment == 0, step, (step + 0x100) << np.maximum(segment - 1, 0))
    return np.where(code & 0x80, size, -size)


_LEVELS: dict[Law, _Levels] = {"mu": _mu_levels(), "a": _a_levels()}


def g711_decode(law: Law, data: bytes) -> FloatAudio:
    """Bytes at 8 kHz -> float32 [1, samples] in -1..1."""
    levels = _LEVELS[law][np.frombuffer(data, np.uint8)]
    return (levels.astype(np.float32) / np.float32(32768.0))[None]


def g711_encode(law: Law, samples: FloatAudio) -> bytes:
    """float32 [1, samples] at 8 kHz -> the code of the nearest level of each; beyond -1..1 is clipped, NaN is 0."""
    wanted = np.clip(np.nan_to_num(samples[0]), -1.0, 1.0) * np.float32(32768.0)
    order = np.argsort(_LEVELS[law], kind="stable").astype(np.uint8)
    levels = _LEVELS[law][order]
    above = np.clip(np.searchsorted(levels, wanted), 1, 255)
    nearer_below = wanted - levels[above - 1] <= levels[above] - wanted
    codes: _Codes = order[np.where(nearer_below, above - 1, above)]
    return codes.tobytes()
