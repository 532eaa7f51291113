"""Reference pictures: what the autoencoder and the vision tower get of them, and their rows in the backbone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from omnistage.models.hunyuan_image3.checkpoint import Checkpoint
from omnistage.models.hunyuan_image3.components import Components
from omnistage.models.hunyuan_image3.layout import Layout, PictureGrid
from omnistage.models.hunyuan_image3.sizes import Size, SizeTable
from omnistage.models.hunyuan_image3.vision import PatchCutter, Patches
from omnistage.payload import Array


@dataclass(frozen=True, slots=True)
class Reference:
    """One picture, ready to be encoded. `pixels` [3, H, W] in -1..1; `noise` [channels, h, w] of its latents."""

    pixels: Tensor
    patches: Patches
    noise: Tensor


@dataclass(frozen=True, slots=True)
class ReferenceRows:
    """Rows of the backbone: `timestep` [hidden], `latent` [h * w, hidden], `vision` [tokens, hidden]."""

    timestep: Tensor
    latent: Tensor
    vision: Tensor


class References:
    """Sizes, pixels and noise of reference pictures for one checkpoint; loads no weights."""

    def __init__(self, checkpoint: Checkpoint, sizes: SizeTable) -> None:
        self._checkpoint = checkpoint
        self._sizes = sizes
        self._patches = PatchCutter(checkpoint)

    def grid(self, shape: tuple[int, int]) -> PictureGrid:
        """Grids of a picture of (height, width) pixels."""
        index = self._sizes.index_of(*shape)
        return PictureGrid(index, self._latent(self._sizes.sizes[index]), self._patches.grid(*shape))

    def noise(self, shapes: Sequence[tuple[int, int]], generator: torch.Generator) -> list[Tensor]:
        """The noise of each picture's latents, drawn in order."""
        grids = [self._latent(self._sizes.nearest(*shape)) for shape in shapes]
        return [torch.randn(1, self._checkpoint.latent_channels, *grid, generator=generator)[0] for grid in grids]

    def read(self, picture: Array, noise: Tensor) -> Reference:
        """A picture uint8 [H, W, 3] as the two encoders take it."""
        height, width = picture.shape[:2]
        return Reference(_fitted(picture, self._sizes.nearest(height, width)), self._patches(picture), noise)

    def _latent(self, size: Size) -> tuple[int, int]:
        return size.height // self._checkpoint.spatial, size.width // self._checkpoint.spatial


class ReferenceEncoder:
    """Autoencoder, vision tower and what brings their outputs into the backbone."""

    def __init__(self, components: Components) -> None:
        self._components = components
        self._scaling = components.checkpoint.scaling
        self._encoder = components.vae_encoder()
        self._vision = components.vision()
        self._patch_embed = components.patch_embed()
        self._time = components.times("time_embed")
        self._timestep = components.times("timestep_emb")

    def latents(self, reference: Reference) -> Tensor:
        """Scaled latents [1, channels, h, w], float32: a sample of the posterior, made with the picture's noise."""
        device = self._components.device
        with self._components.half_precision():
            moments = self._encoder(reference.pixels[None].to(device))
        latents: Tensor = (moments.mean + moments.std * reference.noise[None].to(device)) * self._scaling
        return latents

    def __call__(self, references: Sequence[Reference]) -> list[ReferenceRows]:
        if not references:
            return []
        zero = torch.zeros(1, device=self._components.device)
        time, timestep = self._time(zero), self._timestep(zero)[0]
        vision = self._vision([reference.patches for reference in references])
        made: list[ReferenceRows] = []
        for reference, seen in zip(references, vision, strict=True):
            latents = self.latents(reference).to(self._components.dtype)
            made.append(ReferenceRows(timestep, self._patch_embed(latents, time)[0], seen))
        return made


def place(rows: Tensor, start: int, layout: Layout, references: Sequence[ReferenceRows | None]) -> None:
    """Writes reference rows over `rows` [n, hidden], which stand for positions `start..start + n` of the layout.

    References that the range does not touch may be None.
    """
    for where, reference in zip(layout.references, references, strict=True):
        if reference is None:
            continue
        pieces = (
            (where.timestep, reference.timestep[None]),
            (where.latent.start, reference.latent),
            (where.vision.start, reference.vision),
        )
        for begin, source in pieces:
            first, last = max(begin, start), min(begin + len(source), start + len(rows))
            if first < last:
                rows[first - start : last - start] = source[first - begin : last - begin].to(rows.dtype)


def content_key(picture: Array, grid: PictureGrid, seed: int) -> bytes:
    """Stands for the rows of a picture: its pixels, its grids and the seed of its noise."""
    digest = blake2b(digest_size=16)
    digest.update(repr((picture.shape, tuple(grid), seed)).encode())
    digest.update(np.ascontiguousarray(picture).data)
    return digest.digest()


def _fitted(picture: Array, size: Size) -> Tensor:
    """float32 [3, height, width] in -1..1: scaled to cover `size` (Lanczos), then the middle of it.

    Only the middle is computed: a long, thin picture would otherwise grow without bound.
    """
    height, width = picture.shape[:2]
    if height / width < size.height / size.width:
        tall, wide = size.height, round(size.height / height * width)
    else:
        tall, wide = round(size.width / width * height), size.width
    top, left = round((tall - size.height) / 2), round((wide - size.width) / 2)
    down, across = height / tall, width / wide
    box = (left * across, top * down, (left + size.width) * across, (top + size.height) * down)
    image = Image.fromarray(np.ascontiguousarray(picture))
    cut = image.resize((size.width, size.height), Image.Resampling.LANCZOS, box=box)
    return torch.from_numpy(np.asarray(cut, np.float32) / 255.0).permute(2, 0, 1) * 2.0 - 1.0
