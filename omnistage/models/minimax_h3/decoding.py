"""From final latents to chunks of pictures and sound. The ports of both live here."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from omnistage.models.minimax_h3.autoencoders import AudioCodec, VideoCodec
from omnistage.models.minimax_h3.geometry import FPS
from omnistage.models.minimax_h3.media import Picture
from omnistage.ops.finite import finite
from omnistage.payload import MultimodalPayload

VIDEO, AUDIO = "video", "audio"
LATENTS, AUDIO_LATENTS = "latents", "audio_latents"
# A chunk of pictures is at most this long, so that it fits the arenas of the stages.
CHUNK_BYTES = 24 << 20


def decode_video(codec: VideoCodec, latents: Tensor) -> tuple[list[MultimodalPayload], float]:
    """Chunks of "video" uint8 [t, H, W, 3], in order, and the seconds that it took.

    Raises StageError for latents that are not finite.
    """
    start = time.monotonic()
    frames = codec.decode(finite(latents, "latents"))
    seconds = time.monotonic() - start
    return [MultimodalPayload.of({"fps": FPS}, video=piece) for piece in _pieces(frames)], seconds


def decode_audio(codec: AudioCodec, latents: Tensor, rate: int) -> tuple[list[MultimodalPayload], float]:
    """One chunk of "audio" float32 [2, samples], and the seconds that it took. Raises StageError as above."""
    start = time.monotonic()
    sound = codec.decode(finite(latents, "latents"))
    seconds = time.monotonic() - start
    return [MultimodalPayload.of({"sample_rate": rate}, audio=sound)], seconds


def latent_chunks(name: str, latents: Tensor) -> list[MultimodalPayload]:
    """The one chunk of a latents port, named like the port."""
    return [MultimodalPayload.of({}, **{name: latents.cpu().numpy()})]


def _pieces(frames: Picture) -> Sequence[Picture]:
    count = max(1, CHUNK_BYTES // frames[0].nbytes)
    return [frames[at : at + count] for at in range(0, len(frames), count)]
