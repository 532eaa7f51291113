"""Pixels and samples to normalised latents and back, by the checkpoint's autoencoders. Both are stateless."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnistage.models.minimax_h3.media import Picture, Sound

# The convention of the autoencoder's pixels: ImageNet's mean and deviation.
_PIXEL_MEAN = (0.485, 0.456, 0.406)
_PIXEL_STD = (0.229, 0.224, 0.225)
# The same picture always gives the same latents: the draw does not depend on the request.
_ENCODE_SEED = 42


class VideoCodec:
    """`vae` is an `AutoencoderKLMiniMaxH3`; its tiling is part of the result and left as it is."""

    def __init__(self, vae: Any, device: torch.device) -> None:
        self._vae = vae
        self._device = device
        self._mean, self._std = (_axis(values, 5) for values in (vae.config.latents_mean, vae.config.latents_std))
        self._pixel_mean, self._pixel_std = _axis(_PIXEL_MEAN, 5).to(device), _axis(_PIXEL_STD, 5).to(device)

    @torch.inference_mode()
    def encode(self, frames: Picture) -> Tensor:
        """uint8 [T, H, W, 3] to float32 [1, C, t, h, w] on the CPU; T is 1 or 17 n + 5. Rounded to float16 once."""
        pixels = torch.from_numpy(np.ascontiguousarray(frames)).to(self._device).permute(3, 0, 1, 2)[None]
        normalised = (pixels.float().div(255.0) - self._pixel_mean) / self._pixel_std
        posterior = self._vae.encode(normalised, return_dict=False)[0]
        drawn: Tensor = posterior.sample(generator=torch.Generator().manual_seed(_ENCODE_SEED))
        return (drawn.to(torch.float16).float().cpu() - self._mean) / self._std

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Picture:
        """float32 [1, C, t, h, w] to uint8 [T, H, W, 3]."""
        scaled = latents.to(self._device) * self._std.to(self._device) + self._mean.to(self._device)
        decoded = self._vae.decode(scaled, return_dict=False)[0]
        frames = torch.empty(decoded.shape[2:] + decoded.shape[1:2], dtype=torch.uint8)
        # Frame by frame: a whole clip in float32 would be there several times.
        for at, frame in enumerate(decoded[0].unbind(1)):
            pixels = (frame.float() * self._pixel_std[0, :, 0] + self._pixel_mean[0, :, 0]).clamp(0, 1)
            frames[at] = (pixels * 255).round().to(torch.uint8).permute(1, 2, 0)
        made: Picture = frames.numpy()
        return made


class AudioCodec:
    """`vae` is an `AutoencoderKLMiniMaxH3Audio`: mono, so the stereo channels are two items of a batch."""

    def __init__(self, vae: Any, device: torch.device) -> None:
        self._vae = vae
        self._device = device
        channels = vae.config.latent_channels
        mean, std = vae.config.latents_mean or [0.0] * channels, vae.config.latents_std or [1.0] * channels
        self._mean, self._std = _axis(mean, 3), _axis(std, 3)

    @torch.inference_mode()
    def encode(self, sound: Sound) -> Tensor:
        """float32 [2, samples] to rows [2 * latents, C] on the CPU, left channel first."""
        waves = torch.from_numpy(np.ascontiguousarray(sound)).to(self._device)[:, None]
        posterior = self._vae.encode(waves, return_dict=False)[0]
        latents: Tensor = (posterior.mode().float().cpu() - self._mean) / self._std
        return latents.transpose(1, 2).reshape(-1, latents.shape[1])

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Sound:
        """float32 [2, C, latents] to float32 [2, samples]."""
        scaled = latents.to(self._device) * self._std.to(self._device) + self._mean.to(self._device)
        decoded = self._vae.decode(scaled, return_dict=False)[0]
        sound: Sound = decoded.float()[:, 0].contiguous().cpu().numpy()
        return sound


def _axis(values: Any, dimensions: int) -> Tensor:
    """Per-channel values for [batch, C, ...] tensors."""
    return torch.tensor(tuple(values), dtype=torch.float32).view(1, -1, *[1] * (dimensions - 2))
