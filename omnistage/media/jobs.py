"""Decoding as plain data: what to decode under which limits; the result as a payload."""

from __future__ import annotations

from typing import Literal

import msgspec

from omnistage.config.model import LimitsConfig
from omnistage.media.audio_decode import decode_audio
from omnistage.media.image import decode_image
from omnistage.media.video_payload import video_payload
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
    [H, W, 3], "video" uint8 [T, H, W, 3] with meta fps. Raises RequestError naming the job's `param`."""
    if job.kind == "audio":
        sound = decode_audio(data, job.limits.max_audio_s, job.param)
        return MultimodalPayload.of({"sample_rate": sound.rate}, audio=sound.samples)
    if job.kind == "image":
        return MultimodalPayload.of(image=decode_image(data, job.limits.max_image_pixels, job.param))
    return video_payload(data, job.limits, job.param, with_sound=job.with_sound)
