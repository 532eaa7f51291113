"""Cuts long recordings into windows that the recogniser can hear at once. Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import soxr

from omnistage.errors import ErrorCode, RequestError

Array = npt.NDArray[Any]

SAMPLE_RATE = 16000
WINDOW_S = 30
# A cut is looked for in the last third of a window, at the quietest fifth of a second.
_SEARCH_S = 10
_QUIET_S = 0.2
_MIN_RATE, _MAX_RATE = 1000, 768000


def to_mono_16k(audio: Array, sample_rate: int) -> Array:
    """float32 [n] at 16 kHz from float [channels, samples] or [samples]. Raises RequestError for unusable audio."""
    if audio.ndim not in (1, 2) or audio.dtype.kind != "f":
        raise RequestError("audio must be floats [channels, samples]", param="audio", code=ErrorCode.UNSUPPORTED_MEDIA)
    if not _MIN_RATE <= sample_rate <= _MAX_RATE:
        raise RequestError(
            f"a sample rate of {sample_rate} Hz is outside {_MIN_RATE} to {_MAX_RATE}",
            param="audio",
            code=ErrorCode.UNSUPPORTED_MEDIA,
        )
    if not np.isfinite(audio).all():
        raise RequestError(
            "the audio holds values that are no numbers", param="audio", code=ErrorCode.UNSUPPORTED_MEDIA
        )
    mono = audio if audio.ndim == 1 else audio.mean(axis=0)
    mono = np.ascontiguousarray(mono, np.float32)
    resampled: Array = mono if sample_rate == SAMPLE_RATE else soxr.resample(mono, sample_rate, SAMPLE_RATE)
    return resampled.astype(np.float32, copy=sample_rate == SAMPLE_RATE)


def split_windows(audio: Array) -> list[tuple[int, int]]:
    """Sample ranges that cover `audio` (16 kHz) without gap or overlap, each of at most 30 s; none for no audio.

    Where more than 30 s are left, the cut is in the middle of the quietest stretch of the last 10 s of the window.
    """
    windows: list[tuple[int, int]] = []
    start = 0
    while len(audio) - start > WINDOW_S * SAMPLE_RATE:
        latest = start + WINDOW_S * SAMPLE_RATE
        earliest = latest - _SEARCH_S * SAMPLE_RATE
        stop = earliest + _quietest(audio[earliest:latest])
        windows.append((start, stop))
        start = stop
    return [*windows, (start, len(audio))] if start < len(audio) else windows


def _quietest(audio: Array) -> int:
    """The middle of the stretch of 0.2 s with the least energy."""
    width = int(_QUIET_S * SAMPLE_RATE)
    energy = np.concatenate(([0.0], np.cumsum(audio.astype(np.float64) ** 2)))
    return int(np.argmin(energy[width:] - energy[:-width])) + width // 2
