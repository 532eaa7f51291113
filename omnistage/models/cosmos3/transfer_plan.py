"""Geometry of a transfer request: control videos drive the output chunk by chunk. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from omnistage.errors import RequestError

# The order in which control videos are packed.
HINTS = ("edge", "blur", "depth", "seg", "wsm")

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class TransferAsk:
    """Frames are pixel frames. A chunk repeats the last `overlap` frames of the one before; `stride` is the rest.

    Guidance acts only at scheduler timesteps within its interval (None: always).
    """

    hints: tuple[str, ...]
    total_frames: int
    chunk_frames: int
    chunks: int
    stride: int
    overlap: int
    first_overlap: int
    control_guidance: float
    guidance_interval: Interval | None
    control_interval: Interval | None

    def window(self, chunk: int) -> tuple[int, int]:
        """First frame and the frame after the last of a chunk, cut to the output's length."""
        start = chunk * self.stride
        return start, min(start + self.chunk_frames, self.total_frames)


def plan_transfer(
    *,
    hints: tuple[str, ...],
    total_frames: int,
    frames_per_chunk: int | None,
    overlap: int,
    first_overlap: int,
    temporal: int,
    guidance: tuple[float, Interval | None, Interval | None],
) -> TransferAsk:
    """Chunks of 4k+1 frames (for `temporal` 4) over `total_frames`. Raises RequestError when they cannot advance."""
    wanted = frames_per_chunk or total_frames
    chunk = 1 if total_frames == 1 else math.ceil((wanted - 1) / temporal) * temporal + 1
    chunks, stride = 1, chunk
    if total_frames > chunk:
        stride = chunk - overlap
        if stride <= 0:
            raise RequestError(
                "num_conditional_frames must be smaller than num_video_frames_per_chunk", param="num_conditional_frames"
            )
        chunks = 1 + math.ceil((total_frames - chunk) / stride)
    control, text_interval, control_interval = guidance
    return TransferAsk(
        hints=hints,
        total_frames=total_frames,
        chunk_frames=chunk,
        chunks=chunks,
        stride=stride,
        overlap=overlap,
        first_overlap=first_overlap,
        control_guidance=control,
        guidance_interval=text_interval,
        control_interval=control_interval,
    )
