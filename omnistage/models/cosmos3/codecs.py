"""The picture VAE and the sound decoder.

The Wan VAE keeps the caches of its causal convolutions on the module, so one call at a time may use it: the decode
thread and the stage's thread share it through a lock.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


class PictureCodec:
    """Encodes and decodes with the checkpoint's latent statistics."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae
        self._lock = threading.Lock()
        shape = (1, -1, 1, 1, 1)
        self._mean = torch.tensor(vae.config.latents_mean, dtype=vae.dtype, device=vae.device).view(shape)
        self._inverse_std = (1.0 / torch.tensor(vae.config.latents_std, dtype=vae.dtype)).to(vae.device).view(shape)

    def encode(self, clip: Tensor) -> Tensor:
        """[1, 3, frames, H, W] in -1..1 -> normalised latents float32 [1, C, T, h, w] (the posterior's mode)."""
        with self._lock:
            mode = self._vae.encode(clip.to(self._vae.device, self._vae.dtype)).latent_dist.mode()
        latents: Tensor = ((mode - self._mean) * self._inverse_std).contiguous().float()
        return latents

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents [1, C, T, h, w] -> float32 [1, 3, frames, H, W] in -1..1 (nearly)."""
        raw = latents.to(self._vae.device, self._vae.dtype) / self._inverse_std + self._mean
        with self._lock:
            clip: Tensor = self._vae.decode(raw).sample
        return clip.float()


class SoundCodec:
    """Decodes sound; stateless."""

    def __init__(self, tokenizer: Any, rate: int) -> None:
        self._tokenizer = tokenizer
        self._weight = next(tokenizer.parameters())
        self.rate = rate

    def decode(self, latents: Tensor) -> Tensor:
        """[D, S] -> float32 [channels, samples]."""
        wave: Tensor = self._tokenizer.decode(latents.unsqueeze(0).to(self._weight.device, self._weight.dtype))
        return wave.squeeze(0).float()


def pixels_of(clip: Tensor) -> Tensor:
    """float [1, 3, frames, H, W] in -1..1 -> uint8 [frames, H, W, 3]."""
    pixels = torch.empty(clip.shape[2:] + clip.shape[1:2], dtype=torch.uint8)
    # Frame by frame: a whole clip in float32 would be there several times.
    for at, frame in enumerate(clip[0].unbind(1)):
        unit = (frame / 2 + 0.5).clamp(0, 1)
        pixels[at] = (unit * 255).round().to(torch.uint8).permute(1, 2, 0)
    return pixels
