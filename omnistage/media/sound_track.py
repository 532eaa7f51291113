"""The sound of a video file."""

from __future__ import annotations

import io

import av

from omnistage.media.audio_decode import DecodedAudio, decode_audio
from omnistage.media.errors import DECODER_ERRORS, unsupported
from omnistage.media.sniff import AUDIO_CONTAINERS, container_of


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
