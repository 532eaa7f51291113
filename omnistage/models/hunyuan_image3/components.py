"""The parts of a checkpoint, each loaded when a stage asks for it and shared by the stages of a process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import nn
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate

from omnistage.models.hunyuan_image3.backbone import Backbone, TextHead
from omnistage.models.hunyuan_image3.checkpoint import Checkpoint
from omnistage.models.hunyuan_image3.embedders import FinalLayer, PatchEmbed, TimeEmbedder
from omnistage.models.hunyuan_image3.rotary import Rotary
from omnistage.models.hunyuan_image3.vae import Decoder, Encoder
from omnistage.models.hunyuan_image3.vision import Vision
from omnistage.models.hunyuan_image3.weights import Slot, WeightFiles, backbone_slots, head_slots, module_slots
from omnistage.shared import SharedObjects

M = TypeVar("M", bound=nn.Module)


class Components:
    """Modules of one checkpoint on one device. The autoencoder and the router stay float32 whatever `dtype` is."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, shared: SharedObjects) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self._shared = shared
        self._files: WeightFiles | None = None

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.checkpoint.head_dim, self.checkpoint.theta, self.device)

    def half_precision(self) -> torch.autocast:
        """The autoencoder's arithmetic: float16 over float32 weights on an accelerator, unless float32 is asked for."""
        enabled = self.device.type != "cpu" and self.dtype != torch.float32
        return torch.autocast(self.device.type, torch.float16, enabled=enabled)

    def backbone(self) -> Backbone:
        # Looping over experts waits for the device at each of them.
        experts = "eager" if self.device.type == "cpu" else "grouped_mm"
        return self._get(
            "backbone", lambda: Backbone(self.checkpoint, experts), lambda m: backbone_slots(m, self.checkpoint)
        )

    def text_head(self) -> TextHead:
        return self._get("text_head", lambda: TextHead(self.checkpoint), head_slots)

    def times(self, name: str) -> TimeEmbedder:
        """One of the time embedders by its stored name."""
        return self._get(name, lambda: TimeEmbedder(self.checkpoint.hidden), lambda m: module_slots(m, name))

    def patch_embed(self) -> PatchEmbed:
        return self._get("patch_embed", lambda: PatchEmbed(self.checkpoint), lambda m: module_slots(m, "patch_embed"))

    def final_layer(self) -> FinalLayer:
        return self._get("final_layer", lambda: FinalLayer(self.checkpoint), lambda m: module_slots(m, "final_layer"))

    def vae_encoder(self) -> Encoder:
        return self._get(
            "vae.encoder", lambda: Encoder(self.checkpoint), lambda m: module_slots(m, "vae.encoder"), torch.float32
        )

    def vae_decoder(self) -> Decoder:
        return self._get(
            "vae.decoder", lambda: Decoder(self.checkpoint), lambda m: module_slots(m, "vae.decoder"), torch.float32
        )

    def vision(self) -> Vision:
        return self._get("vision", lambda: Vision(self.checkpoint), _vision_slots)

    def _get(
        self,
        name: str,
        make: Callable[[], M],
        slots: Callable[[M], Iterable[Slot]],
        dtype: torch.dtype | None = None,
    ) -> M:
        """Raises ConfigError when the weights do not fit."""
        kind = dtype or self.dtype
        key = ("hunyuan_image3", name, str(self.checkpoint.folder), str(self.device), str(kind))

        def build() -> M:
            with torch.device("meta"):
                module = make().to(kind)
            _keep_routers(module)
            module.to_empty(device=self.device)
            self._weights().fill(slots(module))
            return module.eval().requires_grad_(False)

        return self._shared.get(key, build)

    def _weights(self) -> WeightFiles:
        if self._files is None:
            self._files = WeightFiles(self.checkpoint.folder)
        return self._files


def _keep_routers(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, HunYuanMoEV1Gate):
            part.wg.float()


def _vision_slots(vision: Vision) -> Iterable[Slot]:
    yield from module_slots(vision.tower, "vision_model")
    yield from module_slots(vision.aligner, "vision_aligner.layers")
