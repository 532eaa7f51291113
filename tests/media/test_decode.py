"""Media from clients: right results for good files, one named error for everything else, limits before memory."""

from __future__ import annotations

import base64
import io
import random
import resource
import time
import zlib
from collections.abc import Callable
from typing import TypeVar

import av
import numpy as np
import pytest
from PIL import Image

from omnistage.errors import ErrorCode, ErrorInfo, RequestError
from omnistage.media.audio_decode import decode_audio
from omnistage.media.audio_encode import encode_audio, wav_header
from omnistage.media.data_url import decode_base64, decode_data_url
from omnistage.media.image import decode_image
from omnistage.media.video import decode_video

T = TypeVar("T")
FORMATS = ("mp3", "opus", "aac", "flac", "wav")


def noise(seconds: float, rate: int = 24_000) -> np.ndarray:
    return np.random.default_rng(3).uniform(-0.3, 0.3, (1, int(seconds * rate))).astype(np.float32)


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    sink = io.BytesIO()
    Image.new(mode, (width, height), 0).save(sink, "PNG")
    return sink.getvalue()


def video(frames: int, size: tuple[int, int] = (48, 32), container: str = "mp4") -> bytes:
    sink = io.BytesIO()
    with av.open(sink, "w", format=container) as target:
        stream = target.add_stream("mpeg4" if container != "webm" else "vp8", rate=10)
        stream.width, stream.height, stream.pix_fmt = size[0], size[1], "yuv420p"
        for index in range(frames):
            picture = np.full((size[1], size[0], 3), 20 * index % 255, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                target.mux(packet)
        for packet in stream.encode(None):
            target.mux(packet)
    return sink.getvalue()


def damaged(data: bytes, seed: int) -> bytes:
    """One of: cut, flipped bytes, shuffled middle, zeros."""
    rng = random.Random(seed)
    raw = bytearray(data)
    if seed % 4 == 0:
        return bytes(raw[: rng.randrange(1, len(raw))])
    if seed % 4 == 1:
        for _ in range(rng.randrange(1, 40)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    elif seed % 4 == 2:
        start = rng.randrange(len(raw))
        raw[start : start + 64] = rng.randbytes(min(64, len(raw) - start))
    else:
        start = rng.randrange(len(raw))
        raw[start:] = bytes(len(raw) - start)
    return bytes(raw)


def attempt(decode: Callable[[bytes], T], data: bytes) -> T | ErrorInfo:
    try:
        return decode(data)
    except RequestError as error:
        return error.info


def test_wav_decodes_to_its_samples() -> None:
    samples = noise(0.3)
    decoded = decode_audio(encode_audio("wav", samples, 24_000), 10)
    assert decoded.rate == 24_000
    np.testing.assert_allclose(decoded.samples, samples, atol=1e-4)


def test_streamed_wav_with_open_sizes_decodes() -> None:
    data = wav_header(16_000, 1) + np.arange(1600, dtype="<i2").tobytes()
    decoded = decode_audio(data, 10)
    assert decoded.samples.shape == (1, 1600)


@pytest.mark.parametrize("name", FORMATS)
def test_audio_longer_than_the_limit_is_refused(name: str) -> None:
    data = encode_audio(name, noise(5.0), 24_000)
    with pytest.raises(RequestError, match="limit of 2 s") as caught:
        decode_audio(data, 2, "messages[0].content[0].input_audio.data")
    assert caught.value.info.code is ErrorCode.TOO_LARGE
    assert caught.value.info.param == "messages[0].content[0].input_audio.data"


def test_cve_2026_54233_small_opus_that_is_hours_long_takes_no_memory() -> None:
    piece = encode_audio("opus", np.zeros((1, 48_000 * 120), np.float32), 48_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError) as caught:
        decode_audio(piece, 10)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert caught.value.info.code is ErrorCode.TOO_LARGE
    assert grown_mb < 40


def test_header_that_lies_about_its_length_is_caught_while_decoding() -> None:
    body = np.zeros(24_000 * 8, "<i2").tobytes()
    short_header = wav_header(24_000, 1, 4800)
    flac = bytearray(encode_audio("flac", noise(4.0), 24_000))
    # STREAMINFO's 36-bit sample count, bits 108..143 after the 8-byte block header: claim zero ("unknown").
    flac[21] &= 0xF0
    flac[22:26] = bytes(4)
    assert decode_audio(short_header + body, 2).samples.shape[1] == 2400
    with pytest.raises(RequestError, match="longer than the limit"):
        decode_audio(bytes(flac), 2)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00" * 100, b"hello world", b"RIFF\x00\x00\x00\x00WAVE", b"OggS" + bytes(60), b"fLaC" + bytes(60), b"ID3"],
)
def test_rubbish_is_refused_naming_the_parameter(data: bytes) -> None:
    with pytest.raises(RequestError, match=r"^file: ") as caught:
        decode_audio(data, 10)
    assert caught.value.info.code is ErrorCode.UNSUPPORTED_MEDIA


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '/etc/passwd'\n",
        "v=0\nm=audio 5004 RTP/AVP 0\n",
        '<?xml version="1.0"?><MPD></MPD>',
    ],
)
def test_playlists_that_would_open_other_files_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="not audio in a known format"):
        decode_audio(text.encode(), 10)


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_audio_gives_samples_or_one_named_error(name: str) -> None:
    data = encode_audio(name, noise(0.4), 24_000)
    started = time.monotonic()
    for seed in range(60):
        outcome = attempt(lambda raw: decode_audio(raw, 10, "file"), damaged(data, seed))
        if isinstance(outcome, ErrorInfo):
            assert outcome.param == "file"
            assert "0x" not in outcome.message
        else:
            assert 0 < outcome.seconds <= 10
    assert time.monotonic() - started < 20


def test_image_decodes_to_rgb() -> None:
    sink = io.BytesIO()
    Image.new("RGB", (5, 3), (10, 20, 30)).save(sink, "PNG")
    pixels = decode_image(sink.getvalue(), 100)
    assert pixels.shape == (3, 5, 3)
    assert pixels[2, 4].tolist() == [10, 20, 30]


def test_transparency_becomes_white() -> None:
    assert decode_image(png(2, 2, "RGBA"), 100)[0, 0].tolist() == [255, 255, 255]


def test_orientation_of_the_camera_is_applied() -> None:
    sink = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (6, 2)).save(sink, "JPEG", exif=exif)
    assert decode_image(sink.getvalue(), 100).shape == (6, 2, 3)


def test_image_bomb_is_refused_from_its_header() -> None:
    row = b"\x00" + bytes(20_000 * 3)
    packed = zlib.compressobj(9)
    body = b"".join(packed.compress(row) for _ in range(40)) + packed.flush()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    size = (20_000).to_bytes(4, "big")
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size + size + b"\x08\x02\x00\x00\x00") + chunk(b"IDAT", body)
    started = time.monotonic()
    with pytest.raises(RequestError) as caught:
        decode_image(bomb, 1 << 25, "image_url")
    assert caught.value.info.code is ErrorCode.TOO_LARGE
    assert time.monotonic() - started < 0.5


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damaged_image_gives_pixels_or_one_named_error(kind: str) -> None:
    sink = io.BytesIO()
    Image.effect_noise((40, 30), 60).convert("RGB").save(sink, kind)
    for seed in range(60):
        outcome = attempt(lambda raw: decode_image(raw, 1 << 16, "image_url"), damaged(sink.getvalue(), seed))
        if isinstance(outcome, ErrorInfo):
            assert outcome.param == "image_url"
        else:
            assert outcome.dtype == np.uint8


@pytest.mark.parametrize("container", ["mp4", "matroska", "webm", "avi"])
def test_video_decodes_to_frames(container: str) -> None:
    decoded = decode_video(video(6, container=container), 100, 1 << 16)
    assert decoded.frames.shape == (6, 32, 48, 3)
    assert decoded.fps == pytest.approx(10, rel=0.01)
    assert decoded.frames[5].mean() == pytest.approx(100, abs=12)


def test_video_with_too_many_frames_is_refused() -> None:
    with pytest.raises(RequestError, match="limit of 4") as caught:
        decode_video(video(8), 4, 1 << 16, "video_url")
    assert caught.value.info.code is ErrorCode.TOO_LARGE


def test_video_with_too_many_pixels_is_refused() -> None:
    with pytest.raises(RequestError, match="48x32"):
        decode_video(video(2), 100, 1000, "video_url")


@pytest.mark.parametrize("container", ["mp4", "matroska", "avi"])
def test_damaged_video_gives_frames_or_one_named_error(container: str) -> None:
    data = video(6, container=container)
    for seed in range(40):
        outcome = attempt(lambda raw: decode_video(raw, 100, 1 << 16, "video_url"), damaged(data, seed))
        if isinstance(outcome, ErrorInfo):
            assert outcome.param == "video_url"
        else:
            assert outcome.frames.shape[1:] == (32, 48, 3)


def test_base64_is_strict_and_bounded() -> None:
    assert decode_base64(base64.b64encode(b"abc").decode(), 3, "p") == b"abc"
    for bad in ("a", "ab\ncd", "a=bc", "ab*d", "äbcd"):
        with pytest.raises(RequestError, match="not valid base64"):
            decode_base64(bad, 100, "p")
    with pytest.raises(RequestError, match="more than 10 bytes") as caught:
        decode_base64("A" * 24, 10, "p")
    assert caught.value.info.code is ErrorCode.TOO_LARGE


def test_data_url_gives_its_bytes() -> None:
    assert decode_data_url("data:audio/wav;base64,QUJD", 10, "p") == b"ABC"
    assert decode_data_url("data:;base64,", 10, "p") == b""


@pytest.mark.parametrize(
    "url", ["data:audio/wav,abc", "data:", "data:x;base64", "data:" + "x" * 1000 + ";base64,QUJD", "data:;base64 ,QQ=="]
)
def test_malformed_data_url_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="a data URL must read"):
        decode_data_url(url, 10, "p")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a.wav",
        "https://example.com/a.png",
        "file:///etc/passwd",
        "//host/x",
        "DATA:;base64,QQ==",
        " data:;base64,QQ==",
        "",
    ],
)
def test_remote_urls_are_refused_by_default(url: str) -> None:
    with pytest.raises(RequestError, match="remote URLs are not fetched"):
        decode_data_url(url, 10, "messages[0].content[0].image_url.url")
