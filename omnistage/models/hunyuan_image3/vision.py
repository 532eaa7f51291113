"""Reference pictures for the vision tower: patches of a picture, and their rows in the backbone.

The tower is transformers' SigLIP2 (NaFlex): a picture keeps its aspect ratio, its patches are padded to a fixed number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Siglip2VisionConfig, Siglip2VisionModel
from transformers.models.siglip2.image_processing_pil_siglip2 import (
    Siglip2ImageProcessorPil,
    get_image_size_for_max_num_patches,
)

from omnistage.models.hunyuan_image3.checkpoint import Checkpoint
from omnistage.payload import Array

_PROCESSOR_KEYS = (
    "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "max_num_patches", "patch_size", "resample",
    "rescale_factor",
)  # fmt: skip
_TOWER_KEYS = (
    "attention_dropout", "hidden_act", "hidden_size", "intermediate_size", "layer_norm_eps", "num_attention_heads",
    "num_channels", "num_hidden_layers", "num_patches", "patch_size",
)  # fmt: skip


class Patches(NamedTuple):
    """float32 [max_patches, patch * patch * 3], of which the first grid[0] * grid[1] are the picture's."""

    pixels: Tensor
    grid: tuple[int, int]


class PatchCutter:
    """The library's picture processor with the checkpoint's settings."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        given = checkpoint.vit_processor
        self._processor = Siglip2ImageProcessorPil(**{key: given[key] for key in _PROCESSOR_KEYS if key in given})
        self._patch, self._most = checkpoint.vit_patch, checkpoint.vit_tokens

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """The grid of patches of a picture of that size in pixels."""
        tall, wide = get_image_size_for_max_num_patches(height, width, self._patch, self._most)
        return tall // self._patch, wide // self._patch

    def __call__(self, picture: Array) -> Patches:
        """Patches of uint8 [H, W, 3]."""
        made: Any = self._processor(picture, input_data_format="channels_last", return_tensors="pt")
        height, width = made["spatial_shapes"][0].tolist()
        return Patches(made["pixel_values"][0].float(), (int(height), int(width)))


class Vision(nn.Module):
    """Tower and projection into the backbone."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        given = {key: checkpoint.vit[key] for key in _TOWER_KEYS if key in checkpoint.vit}
        config: Any = Siglip2VisionConfig(**given, vision_use_head=False)
        config._attn_implementation = "sdpa"
        self.tower = Siglip2VisionModel(config)
        width = int(checkpoint.vit["hidden_size"])
        self.aligner = nn.Sequential(
            nn.Linear(width, checkpoint.hidden), nn.GELU(), nn.Linear(checkpoint.hidden, checkpoint.hidden)
        )

    def features(self, patches: list[Patches]) -> Tensor:
        """[n, max_patches, width], padding rows included."""
        reference = self.aligner.get_parameter("0.weight")
        device = reference.device
        pixels = torch.stack([one.pixels for one in patches]).to(device, reference.dtype)
        filled = torch.tensor([one.grid[0] * one.grid[1] for one in patches], device=device)
        mask = torch.arange(pixels.shape[1], device=device) < filled[:, None]
        shapes = torch.tensor([one.grid for one in patches], device=device)
        features: Tensor = self.tower(
            pixel_values=pixels, pixel_attention_mask=mask.int(), spatial_shapes=shapes
        ).last_hidden_state
        return features

    def forward(self, patches: list[Patches]) -> Tensor:
        """Rows of the backbone [n, max_patches, hidden]."""
        rows: Tensor = self.aligner(self.features(patches))
        return rows
