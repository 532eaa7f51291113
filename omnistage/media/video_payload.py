"""A video file as the engine takes it."""

from __future__ import annotations

from omnistage.config.model import LimitsConfig
from omnistage.media.sound_track import decode_sound_track
from omnistage.media.video import decode_video
from omnistage.payload import MultimodalPayload


def video_payload(data: bytes, limits: LimitsConfig, param: str, *, with_sound: bool) -> MultimodalPayload:
    """Tensor "video" uint8 [T, H, W, 3] with meta fps; with its sound, if it has one and it is wanted, the tensor
    "audio" float32 [channels, samples] with meta sample_rate. Raises RequestError naming `param`."""
    video = decode_video(data, limits.max_video_frames, limits.max_image_pixels, param)
    sound = decode_sound_track(data, limits.max_audio_s, param) if with_sound else None
    if sound is None:
        return MultimodalPayload.of({"fps": video.fps}, video=video.frames)
    return MultimodalPayload.of({"fps": video.fps, "sample_rate": sound.rate}, video=video.frames, audio=sound.samples)
