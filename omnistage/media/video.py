"""Video bytes -> uint8 [frames, height, width, 3]."""

from __future__ import annotations

import io
import time

import av
import msgspec
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.video.stream import VideoStream

from omnistage.media.errors import DECODER_ERRORS, too_large, unsupported
from omnistage.media.sniff import VIDEO_CONTAINERS, container_of

DECODE_TIMEOUT_S = 60.0
DEFAULT_FPS = 24.0
# Bytes of decoded frames that one video may take.
MAX_VIDEO_BYTES = 1 << 30


class DecodedVideo(msgspec.Struct, frozen=True, eq=False):
    """`frames` uint8 [T, H, W, 3] at `fps` frames per second."""

    frames: npt.NDArray[np.uint8]
    fps: float


def decode_video(data: bytes, max_frames: int, max_pixels: int, param: str = "video") -> DecodedVideo:
    """Decodes mp4/mov, webm/mkv or avi.

    Raises RequestError naming `param`: UNSUPPORTED_MEDIA for anything unreadable, TOO_LARGE beyond `max_frames`,
    `max_pixels` per frame, or 1 GiB of decoded frames.
    """
    container = container_of(data)
    if container not in VIDEO_CONTAINERS:
        raise unsupported("not a video in a known format (mp4, mov, webm, mkv, avi)", param)
    try:
        with av.open(io.BytesIO(data), "r", format=container.partition(",")[0], metadata_errors="ignore") as source:
            return _decode(source, max_frames, max_pixels, param)
    except DECODER_ERRORS:
        raise unsupported("the video is damaged or of an unsupported codec", param) from None


def _decode(source: InputContainer, max_frames: int, max_pixels: int, param: str) -> DecodedVideo:
    stream = next(iter(source.streams.video), None)
    if stream is None:
        raise unsupported("the file has no video track", param)
    if stream.frames > max_frames:
        raise too_large(f"{stream.frames} frames exceed the limit of {max_frames}", param)
    size = (stream.codec_context.height, stream.codec_context.width)
    if size[0] * size[1] > max_pixels:
        raise too_large(f"{size[1]}x{size[0]} exceeds the limit of {max_pixels} pixels per frame", param)
    frames = _frames(source, stream, (max_frames, size), param)
    if not frames:
        raise unsupported("the file holds no frames", param)
    return DecodedVideo(np.stack(frames), float(stream.average_rate or DEFAULT_FPS))


def _frames(
    source: InputContainer, stream: VideoStream, limits: tuple[int, tuple[int, int]], param: str
) -> list[npt.NDArray[np.uint8]]:
    max_frames, size = limits
    deadline = time.monotonic() + DECODE_TIMEOUT_S
    frames = list[npt.NDArray[np.uint8]]()
    for frame in source.decode(stream):
        if (frame.height, frame.width) != size:
            raise unsupported("the frame size changes within the file", param)
        over_budget = (len(frames) + 1) * size[0] * size[1] * 3 > MAX_VIDEO_BYTES
        if len(frames) >= max_frames or over_budget or time.monotonic() > deadline:
            raise too_large(f"the video exceeds the limit of {max_frames} frames or 1 GiB decoded", param)
        frames.append(np.ascontiguousarray(frame.to_ndarray(format="rgb24"), np.uint8))
    return frames
