"""Client media as the model takes them: pictures on the canvas, clips at 24 fps, stereo sound at the model's rate.

Torch-free. Pictures are uint8 [H, W, 3], clips uint8 [T, H, W, 3], sound float32 [2, samples].
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from omnistage.models.minimax_h3.geometry import FPS, STEREO, nearest_multiple

Picture = npt.NDArray[np.uint8]
Sound = npt.NDArray[np.float32]

# Windowed-sinc resampling with a Hann window: zero crossings on each side and the fraction of the band that is kept
# (the defaults of torchaudio.transforms.Resample).
_CROSSINGS = 6
_ROLLOFF = 0.99
_BLOCK = 1 << 14


def stretched(picture: Picture, height: int, width: int) -> Picture:
    """The picture with the given sides (LANCZOS), its ratio not kept."""
    if picture.shape[:2] == (height, width):
        return picture
    return np.array(Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS))


def covered(picture: Picture, height: int, width: int) -> Picture:
    """The picture scaled to cover the given sides, its middle cut out."""
    if picture.shape[:2] == (height, width):
        return picture
    high, wide = picture.shape[:2]
    scale = max(width / wide, height / high)
    big_wide, big_high = max(width, round(wide * scale)), max(height, round(high * scale))
    top, left = (big_high - height) // 2, (big_wide - width) // 2
    return stretched(picture, big_high, big_wide)[top : top + height, left : left + width]


def reference_picture(picture: Picture, short_edge: int, multiple: int) -> Picture:
    """The picture with its short edge at `short_edge`, both sides at the nearest multiple; no cap on the area."""
    high, wide = picture.shape[:2]
    scale = short_edge / min(high, wide)
    return stretched(picture, nearest_multiple(high * scale, multiple), nearest_multiple(wide * scale, multiple))


def at_model_rate(clip: Picture, fps: float) -> Picture:
    """The clip at 24 fps: each frame is held until the next one's slot."""
    if fps == FPS:
        return clip
    scale = FPS / fps
    slots = np.floor(np.arange(len(clip)) * scale + 0.5).astype(np.int64)
    end = math.floor(len(clip) * scale + 0.5)
    return np.repeat(clip, np.diff(slots, append=end), axis=0)


def reference_clip(clip: Picture, fps: float, frames: int, size: tuple[int, int]) -> Picture:
    """At most `frames` frames at 24 fps on a canvas of `size` (height, width)."""
    held = at_model_rate(clip, fps)[:frames]
    if held.shape[1:3] == size:
        return held
    return np.stack([stretched(frame, *size) for frame in held])


def reference_sound(sound: Sound, rate: int, target_rate: int, frames: int) -> Sound:
    """Stereo at `target_rate` (Hz), at most as long as `frames` frames. `sound` is mono or stereo at `rate`."""
    cut = sound[:, : int(frames / FPS * rate)]
    stereo = np.repeat(cut, STEREO // len(cut), axis=0)
    return stereo if rate == target_rate else resampled(stereo, rate, target_rate)


def resampled(sound: Sound, rate: int, target_rate: int) -> Sound:
    """float32 [channels, ceil(samples * target_rate / rate)], band-limited by a windowed sinc.

    Formula: torchaudio 2.x, `functional.resample` (`sinc_interp_hann`).
    """
    common = math.gcd(rate, target_rate)
    source, target = rate // common, target_rate // common
    kernel = _sinc_kernel(source, target)
    half = (kernel.shape[1] - source) // 2
    padded = np.pad(sound, ((0, 0), (half, half + source)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[1], axis=1)[:, ::source]
    count = -(-target * sound.shape[1] // source)
    pieces = [windows[:, at : at + _BLOCK] @ kernel.T for at in range(0, windows.shape[1], _BLOCK)]
    joined: Sound = np.concatenate(pieces, axis=1).reshape(len(sound), -1)
    return joined[:, :count]


def _sinc_kernel(source: int, target: int) -> Sound:
    """[target phases, taps]; the taps reach `half` samples before and `half + source` after."""
    base = min(source, target) * _ROLLOFF
    half = math.ceil(_CROSSINGS * source / base)
    offsets = np.arange(-half, half + source) / source
    time = (offsets[None] - np.arange(target)[:, None] / target) * base
    time = time.clip(-_CROSSINGS, _CROSSINGS)
    window = np.cos(time * math.pi / _CROSSINGS / 2) ** 2
    kernel: Sound = (np.sinc(time) * window * (base / source)).astype(np.float32)
    return kernel
