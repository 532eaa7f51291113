"""Decoding as plain data: what to decode under which limits; the result as a payload."""

from __future__ import annotations

import io
from typing import Literal

import av
import msgspec

from omnistage.config.model import LimitsConfig
from omnistage.media.audio_decode import DecodedAudio, decode_audio
from omnistage.media.errors import DECODER_ERRORS, unsupported
from omnistage.media.image import decode_image
from omnistage.media.sniff import AUDIO_CONTAINERS, container_of
from omnistage.media.video import decode_video
from omnistage.payload import MultimodalPayload

MediaKind = Literal["audio", "image", "video"]


class DecodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """One file to decode. `param` is the request field it came in; `with_sound`: a video's sound track too."""

    kind: MediaKind
    limits: LimitsConfig
    param: str
    with_sound: bool = False


def decode(job: DecodeJob, data: bytes) -> MultimodalPayload:
    """The file as the engine takes it: "audio" float32 [channels, samples] with meta sample_rate, "image" uint8
    [H, W, 3], "video" uint8 [T, H, W, 3] with meta fps and, with its sound, the "audio" of its track if it has one.
    Raises RequestError naming the job's `param`."""
    if job.kind == "audio":
        sound = decode_audio(data, job.limits.max_audio_s, job.param)
        return MultimodalPayload.of({"sample_rate": sound.rate}, audio=sound.samples)
    if job.kind == "image":
        return MultimodalPayload.of(image=decode_image(data, job.limits.max_image_pixels, job.param))
    video = decode_video(data, job.limits.max_video_frames, job.limits.max_image_pixels, job.param)
    track = decode_sound_track(data, job.limits.max_audio_s, job.param) if job.with_sound else None
    if track is None:
        return MultimodalPayload.of({"fps": video.fps}, video=video.frames)
    return MultimodalPayload.of({"fps": video.fps, "sample_rate": track.rate}, video=video.frames, audio=track.samples)


def decode_sound_track(data: bytes, max_seconds: float, param: str = "video") -> DecodedAudio | None:
    """The first audio track of an mp4/mov or webm/mkv file; None when it has none.

    Raises RequestError naming `param`: UNSUPPORTED_MEDIA for anything unreadable, TOO_LARGE beyond `max_seconds`.
    """
    container = container_of(data)
    if container not in AUDIO_CONTAINERS:
        return None
    try:
        with av.open(io.BytesIO(data), "r", format=container.partition(",")[0], metadata_errors="ignore") as source:
            silent = not source.streams.audio
    except DECODER_ERRORS:
        raise unsupported("the video is damaged or of an unsupported codec", param) from None
    return None if silent else decode_audio(data, max_seconds, param)
