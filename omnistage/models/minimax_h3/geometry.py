"""Sizes of pictures, clips and latents, in plain numbers. Torch-free.

Formulas: the model's published pipeline (diffusers 0.42, `modular_pipelines/minimax_h3`).
"""

from __future__ import annotations

FPS = 24
AUDIO_LATENTS_PER_SECOND = 40
STEREO = 2
MIN_FRAMES, MAX_FRAMES = 5 * FPS, 15 * FPS
MAX_RATIO = 4


def canvas(width: float, height: float, *, multiple: int, short_edge: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) in pixels for the aspect ratio width : height.

    The short edge is `short_edge`, the area shrinks to `max_pixels`, then both sides go to the nearest multiple.
    Raises ValueError for ratios beyond 1:4 and 4:1.
    """
    if not is_ratio_allowed(width, height):
        raise ValueError(f"the aspect ratio {width:g}:{height:g} is not within 1:{MAX_RATIO} and {MAX_RATIO}:1")
    ratio = width / height
    wide, high = (short_edge * ratio, float(short_edge)) if ratio >= 1.0 else (float(short_edge), short_edge / ratio)
    if wide * high > max_pixels:
        scale = (max_pixels / (wide * high)) ** 0.5
        wide, high = wide * scale, high * scale
    return nearest_multiple(high, multiple), nearest_multiple(wide, multiple)


def is_ratio_allowed(width: float, height: float) -> bool:
    return width > 0 and height > 0 and 1 / MAX_RATIO <= width / height <= MAX_RATIO


def nearest_multiple(side: float, multiple: int) -> int:
    """The multiple nearest to `side` (halves to even), at least one."""
    return max(multiple, round(side / multiple) * multiple)


def aligned_frames(frames: int, clip_frames: int, clip_latents: int) -> int:
    """`frames` rounded up to the next clip_frames * n + clip_latents."""
    return frames + (clip_latents - frames) % clip_frames


def encodable_frames(frames: int, clip_frames: int, clip_latents: int) -> int:
    """`frames` rounded down to clip_frames * n + clip_latents, n at least 1 (the encoder repeats the last frame)."""
    return clip_frames * max(1, (frames - clip_latents) // clip_frames) + clip_latents


def latent_frames(frames: int, clip_frames: int, clip_latents: int) -> int:
    """Latent frames of an aligned number of frames."""
    return clip_latents * ((frames - clip_latents) // clip_frames) + 2


def audio_latents(frames: int) -> int:
    """Audio latents per channel that go with so many frames."""
    return round(frames / FPS * AUDIO_LATENTS_PER_SECOND)
