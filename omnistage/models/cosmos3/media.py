"""Client media as tensors that the picture VAE takes: float32 in -1..1, [1, 3, frames, height, width]."""

from __future__ import annotations

import math

import torch
from diffusers.video_processor import VideoProcessor
from PIL import Image
from torch import Tensor
from torch.nn import functional

from omnistage.models.cosmos3.action import Canvas
from omnistage.payload import Array


class Frames:
    """Resizes as the reference pipelines do. `multiple`: pixels per latent."""

    def __init__(self, multiple: int) -> None:
        self._processor = VideoProcessor(vae_scale_factor=multiple, resample="bilinear")

    def video(self, frames: Array, size: tuple[int, int] | None) -> Tensor:
        """uint8 [T, H, W, 3] at `size` (height, width); None: each side cut down to a multiple."""
        pictures = [Image.fromarray(frame) for frame in frames]
        height, width = size or (None, None)
        clip: Tensor = self._processor.preprocess_video(pictures, height=height, width=width)
        return clip

    def image(self, picture: Array, size: tuple[int, int]) -> Tensor:
        """uint8 [H, W, 3], resized to cover `size` (height, width) and cropped in the middle: one frame."""
        height, width = size
        pixels = torch.from_numpy(picture.copy()).permute(2, 0, 1).unsqueeze(0).to(torch.float32)
        scale = max(width / pixels.shape[-1], height / pixels.shape[-2])
        cover = (math.ceil(scale * pixels.shape[-2]), math.ceil(scale * pixels.shape[-1]))
        pixels = functional.interpolate(pixels, size=cover, mode="bilinear", align_corners=False, antialias=True)
        top, left = round((cover[0] - height) / 2), round((cover[1] - width) / 2)
        pixels = pixels[:, :, top : top + height, left : left + width]
        return (pixels.round().clamp(0, 255) / 127.5 - 1.0).unsqueeze(2)

    def on_canvas(self, frames: Array, canvas: Canvas, count: int) -> Tensor:
        """uint8 [T, H, W, 3]: the first `count` frames (the last one repeated), shrunk to the content and padded."""
        clip = repeat_last(self.video(frames, None)[:, :, :count], count)
        flat = clip.permute(0, 2, 1, 3, 4).reshape(-1, 3, *clip.shape[-2:])
        content = (canvas.content_height, canvas.content_width)
        if content != tuple(flat.shape[-2:]):
            flat = functional.interpolate(flat, size=content, mode="bicubic", align_corners=False, antialias=True)
        right, bottom = canvas.width - content[1], canvas.height - content[0]
        if right or bottom:
            mode = "replicate" if right >= content[1] or bottom >= content[0] else "reflect"
            flat = functional.pad(flat, (0, right, 0, bottom), mode=mode)
        return flat.reshape(1, count, 3, canvas.height, canvas.width).permute(0, 2, 1, 3, 4)


def repeat_last(clip: Tensor, count: int) -> Tensor:
    """[1, 3, T, H, W] made `count` frames long by repeating its last frame."""
    missing = count - clip.shape[2]
    if missing <= 0:
        return clip
    return torch.cat((clip, clip[:, :, -1:].expand(-1, -1, missing, -1, -1)), dim=2)


def reflect_in_time(clip: Tensor, count: int) -> Tensor:
    """[1, 3, T, H, W] made `count` frames long by playing it backwards from its end; a single frame is repeated."""
    while clip.shape[2] < count:
        more = min(clip.shape[2] - 1, count - clip.shape[2])
        if more <= 0:
            return repeat_last(clip, count)
        clip = torch.cat((clip, clip.flip(dims=[2])[:, :, :more]), dim=2)
    return clip
