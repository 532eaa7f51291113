"""Two hundred broken media files, made from good ones: cut, bent, padded, lied about. The same on every run."""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import av
import numpy as np
from PIL import Image

from omnistage.media.audio_encode import encode_audio

COUNT = 200
Files = list[tuple[str, bytes]]


def good() -> Files:
    """One small file per format, by kind."""
    files: Files = []
    for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        sink = io.BytesIO()
        Image.effect_noise((24, 17), 60).convert("RGB").save(sink, name)
        files.append(("image", sink.getvalue()))
    tone = np.sin(np.arange(4800, dtype=np.float32) / 11)[None]
    for name in ("wav", "mp3", "flac", "opus", "aac"):
        files.append(("audio", encode_audio(name, tone, 24_000)))
    for container, codec in (("mp4", "mpeg4"), ("webm", "vp8"), ("avi", "mpeg4")):
        files.append(("video", _video(container, codec)))
    return files


def _video(container: str, codec: str) -> bytes:
    sink = io.BytesIO()
    with av.open(sink, "w", format=container) as target:
        stream = target.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for index in range(4):
            picture = np.full((24, 32, 3), 60 * index, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                target.mux(packet)
        for packet in stream.encode(None):
            target.mux(packet)
    return sink.getvalue()


def _cut(raw: bytearray, chance: random.Random) -> bytearray:
    return raw[: chance.randrange(1, len(raw))]


def _bent(raw: bytearray, chance: random.Random) -> bytearray:
    for _ in range(chance.choice((1, 4, 40))):
        raw[chance.randrange(len(raw))] = chance.randrange(256)
    return raw


def _lying_sizes(raw: bytearray, chance: random.Random) -> bytearray:
    """Writes huge numbers over the header's fields."""
    at = chance.randrange(4, min(len(raw) - 4, 64))
    raw[at : at + 4] = chance.choice((b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f"))
    return raw


def _hole(raw: bytearray, chance: random.Random) -> bytearray:
    at = chance.randrange(len(raw))
    raw[at : at + len(raw) // 3] = bytes(len(raw[at : at + len(raw) // 3]))
    return raw


def _shuffled(raw: bytearray, chance: random.Random) -> bytearray:
    blocks = [raw[at : at + 32] for at in range(16, len(raw), 32)]
    chance.shuffle(blocks)
    return raw[:16] + b"".join(blocks)


def _repeated(raw: bytearray, chance: random.Random) -> bytearray:
    return raw[: len(raw) // 2] * chance.choice((2, 50))


def _padded(raw: bytearray, chance: random.Random) -> bytearray:
    return raw[: chance.randrange(8, 40)] + chance.randbytes(5000)


DAMAGES: tuple[Callable[[bytearray, random.Random], bytearray], ...] = (
    _cut,
    _bent,
    _lying_sizes,
    _hole,
    _shuffled,
    _repeated,
    _padded,
)


def broken() -> Files:
    """`COUNT` files with the kind that each claims to be; some claim to be of another kind."""
    chance = random.Random(20260101)
    sources = good()
    files: Files = []
    while len(files) < COUNT:
        kind, data = sources[len(files) % len(sources)]
        damage = DAMAGES[len(files) // len(sources) % len(DAMAGES)]
        claimed = chance.choice(("image", "audio", "video")) if chance.random() < 0.1 else kind
        files.append((claimed, bytes(damage(bytearray(data), chance))))
    return files
