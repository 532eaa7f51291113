"""What the stages of the family share: the checkpoint that is served, devices and types, the autoencoders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from omnistage.config.model import StageContext
from omnistage.errors import ConfigError
from omnistage.models.minimax_h3.autoencoders import AudioCodec, VideoCodec
from omnistage.models.minimax_h3.checkpoint import PARTITIONS, Checkpoint, read_checkpoint
from omnistage.models.minimax_h3.loading import load_audio_vae, load_vae
from omnistage.ops.device import choose_device
from omnistage.ops.dtype import choose_dtype


def served_checkpoint(context: StageContext) -> Checkpoint:
    """The checkpoint with the partitions that the diffusion stage serves. Raises ConfigError when there are none."""
    checkpoint = read_checkpoint(Path(context.model_path))
    wanted = context.config.stages["diffusion"].options["partition"]
    if wanted in ("auto", "both"):
        missing = [name for name in PARTITIONS if name not in checkpoint.partitions]
        if wanted == "both" and missing:
            raise ConfigError(f"stages.diffusion.partition: both, but the checkpoint has no {missing[0]}")
        return checkpoint
    partitions = tuple(name for name in checkpoint.partitions if name == wanted)
    if not partitions:
        raise ConfigError(f"stages.diffusion.partition: the checkpoint has no {wanted}")
    return replace(checkpoint, partitions=partitions)


def max_pixels(context: StageContext) -> int:
    return int(context.config.stages["diffusion"].options["max_pixels"])


def device_and_dtype(context: StageContext) -> tuple[torch.device, torch.dtype]:
    device = choose_device(context.stage.device)
    return device, choose_dtype(context.stage.dtype, device).dtype


def codecs(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> tuple[VideoCodec, AudioCodec]:
    video = load_vae(checkpoint.folder, dtype, device)
    return VideoCodec(video, device), AudioCodec(load_audio_vae(checkpoint.folder, device), device)
