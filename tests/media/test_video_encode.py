"""mp4 files made of frames and sound, read back by the decoders."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest

from omnistage.media.video import decode_video
from omnistage.media.video_encode import encode_video


def gradient(frames: int, height: int, width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    y, x = np.mgrid[0:height, 0:width]
    pictures = [np.stack([x * 200 / width, y * 200 / height, np.full_like(x, 20 * i)], -1) for i in range(frames)]
    return np.stack(pictures).astype(np.uint8)


def test_frames_come_back_in_order_at_their_rate() -> None:
    frames = gradient(9, 32, 48)
    decoded = decode_video(encode_video(frames, 16.0), 100, 1 << 20)
    assert decoded.frames.shape == frames.shape
    assert decoded.fps == pytest.approx(16.0)
    assert np.abs(decoded.frames.astype(int) - frames).mean() < 6


def test_fractional_rates_are_kept() -> None:
    assert decode_video(encode_video(gradient(5, 32, 32), 30000 / 1001), 100, 1 << 20).fps == pytest.approx(29.97, 1e-4)


@pytest.mark.parametrize(("rate", "channels"), [(48_000, 2), (6_000, 1)])
def test_sound_is_in_the_file_with_its_duration(rate: int, channels: int) -> None:
    seconds = 0.75
    wave = np.sin(np.arange(int(seconds * rate)) * 2 * np.pi * 440 / rate).astype(np.float32)
    data = encode_video(gradient(12, 32, 32), 16.0, np.stack([wave] * channels), rate)
    with av.open(io.BytesIO(data)) as source:
        (track,) = source.streams.audio
        samples = sum(frame.samples for frame in source.decode(track))
        assert track.codec_context.channels == channels
        assert samples / track.codec_context.sample_rate == pytest.approx(seconds, abs=0.3)


def test_odd_sides_lose_a_pixel() -> None:
    assert decode_video(encode_video(gradient(3, 33, 47), 8.0), 100, 1 << 20).frames.shape == (3, 32, 46, 3)


def test_the_index_comes_before_the_data() -> None:
    data = encode_video(gradient(3, 32, 32), 8.0)
    assert data[4:8] == b"ftyp"
    assert data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize("shape", [(0, 32, 32, 3), (2, 1, 32, 3)])
def test_nothing_to_show_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no video"):
        encode_video(np.zeros(shape, np.uint8), 8.0)
