from __future__ import annotations

import io

import av
import numpy as np
import pytest

from omnistage.config.model import LimitsConfig
from omnistage.errors import RequestError
from omnistage.media.jobs import DecodeJob, decode, decode_sound_track
from omnistage.payload import MultimodalPayload

SECONDS = 1.0
RATE = 24_000


def film(container: str = "mp4", *, sound: bool = True) -> bytes:
    """One second of grey frames, with a tone."""
    sink = io.BytesIO()
    with av.open(sink, "w", format=container) as target:
        pictures = target.add_stream("libx264" if container == "mp4" else "mpeg4", rate=8)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 32, "yuv420p"
        tones = target.add_stream("aac", rate=RATE, layout="mono") if sound else None
        for _ in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((32, 64, 3), 120, np.uint8), format="rgb24")
            target.mux(pictures.encode(frame))
        target.mux(pictures.encode(None))
        if tones is not None:
            tone = np.sin(np.arange(int(SECONDS * RATE)) / 10).astype(np.float32)[None] * 0.3
            samples = av.AudioFrame.from_ndarray(tone, format="fltp", layout="mono")
            samples.sample_rate = RATE
            target.mux(tones.encode(samples))
            target.mux(tones.encode(None))
    return sink.getvalue()


def read(data: bytes, *, with_sound: bool) -> MultimodalPayload:
    return decode(DecodeJob(kind="video", limits=LimitsConfig(), param="video", with_sound=with_sound), data)


def test_a_heard_video_brings_its_sound() -> None:
    payload = read(film(), with_sound=True)
    assert payload.meta == {"fps": 8.0, "sample_rate": RATE}
    assert payload["video"].shape == (8, 32, 64, 3)
    assert payload["audio"].shape[0] == 1
    assert payload["audio"].shape[1] == pytest.approx(SECONDS * RATE, abs=2048)
    assert float(np.abs(payload["audio"]).max()) > 0.1


def test_an_unheard_video_brings_no_sound() -> None:
    payload = read(film(), with_sound=False)
    assert list(payload.tensors) == ["video"]


@pytest.mark.parametrize("data", [film(sound=False), film("avi", sound=False)], ids=["mp4", "avi"])
def test_a_silent_video_has_no_sound_track(data: bytes) -> None:
    assert decode_sound_track(data, 60) is None
    assert list(read(data, with_sound=True).tensors) == ["video"]


def test_a_sound_track_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(RequestError, match="limit") as error:
        decode_sound_track(film(), 0.25, "clip")
    assert error.value.info.param == "clip"


@pytest.mark.parametrize("keep", [40, 400])
def test_a_damaged_video_is_refused_by_name(keep: int) -> None:
    with pytest.raises(RequestError) as error:
        decode_sound_track(film()[:keep], 60, "clip")
    assert error.value.info.param == "clip"
