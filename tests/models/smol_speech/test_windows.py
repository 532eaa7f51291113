"""Cutting recordings for the recogniser."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.errors import RequestError
from omnistage.models.smol_speech.windows import SAMPLE_RATE, WINDOW_S, split_windows, to_mono_16k


def noise(seconds: float) -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.5, 0.5, int(seconds * SAMPLE_RATE)).astype(np.float32)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 130))
def test_windows_cover_everything_once_and_are_short_enough(seconds: int) -> None:
    audio = noise(seconds)
    windows = split_windows(audio)
    assert [start for start, _ in windows] == [0, *(stop for _, stop in windows)][: len(windows)]
    assert (windows[-1][1] if windows else 0) == len(audio)
    assert all(0 < stop - start <= WINDOW_S * SAMPLE_RATE for start, stop in windows)


def test_the_cut_is_in_the_pause() -> None:
    audio = noise(40)
    audio[int(24.0 * SAMPLE_RATE) : int(24.5 * SAMPLE_RATE)] = 0
    assert 24.0 <= split_windows(audio)[0][1] / SAMPLE_RATE <= 24.5


def test_exactly_one_window_is_not_cut() -> None:
    assert split_windows(noise(WINDOW_S)) == [(0, WINDOW_S * SAMPLE_RATE)]


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_any_rate_becomes_16_khz_of_the_same_length_and_pitch(rate: int) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)
    mono = to_mono_16k(np.stack([tone, tone]), rate)
    assert mono.dtype == np.float32
    assert abs(len(mono) - SAMPLE_RATE) <= 1
    assert int(np.abs(np.fft.rfft(mono)).argmax()) == 440


@pytest.mark.parametrize(
    ("audio", "rate"),
    [
        (np.array([[np.nan, 0.0]], np.float32), 16000),
        (np.array([[np.inf]], np.float32), 16000),
        (np.zeros((1, 10), np.float32), 0),
        (np.zeros((1, 10), np.int16), 16000),
        (np.zeros((1, 1, 10), np.float32), 16000),
    ],
)
def test_unusable_audio_is_refused(audio: np.ndarray, rate: int) -> None:
    with pytest.raises(RequestError):
        to_mono_16k(audio, rate)


def test_the_caller_keeps_his_array() -> None:
    audio = noise(1)
    mono = to_mono_16k(audio, SAMPLE_RATE)
    assert not np.shares_memory(mono, audio)
