"""Reads the official safetensors layout, tensor by tensor, straight into modules: only what a stage asks for.

A `Slot` says under which name a tensor is stored, what shape it has there and how it gets into a module: some tensors
are stored in another arrangement than the library's modules have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from omnistage.errors import ConfigError
from omnistage.models.hunyuan_image3.backbone import Backbone, TextHead
from omnistage.models.hunyuan_image3.checkpoint import Checkpoint


class Slot(NamedTuple):
    """`write` takes the stored tensor, whose shape has been checked."""

    name: str
    shape: tuple[int, ...]
    write: Callable[[Tensor], None]


class WeightFiles:
    """The safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Path] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ConfigError("hunyuan_image3: the folder has no .safetensors file", param="model")
        for file in files:
            with _opened(file) as content:
                names = list(content.keys())
            for name in names:
                first = self._file_of.setdefault(name, file)
                if first is not file:
                    raise ConfigError(f"hunyuan_image3: {name} is in {first.name} and in {file.name}", param="model")

    @torch.no_grad()
    def fill(self, slots: Iterable[Slot]) -> None:
        """Raises ConfigError naming a tensor that is missing or has another shape."""
        by_file: dict[Path, list[Slot]] = {}
        for slot in slots:
            if slot.name not in self._file_of:
                raise ConfigError(f"hunyuan_image3: the weights lack {slot.name}", param="model")
            by_file.setdefault(self._file_of[slot.name], []).append(slot)
        for file, wanted in by_file.items():
            with _opened(file) as content:
                for slot in wanted:
                    self._write(slot, content)

    def _write(self, slot: Slot, content: Any) -> None:
        shape = tuple(content.get_slice(slot.name).get_shape())
        if shape != slot.shape:
            raise ConfigError(
                f"hunyuan_image3: {slot.name} is {list(shape)}, the configuration says {list(slot.shape)}",
                param="model",
            )
        slot.write(content.get_tensor(slot.name))


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"hunyuan_image3: {file.name} cannot be read: {error}", param="model") from None


def module_slots(module: nn.Module, prefix: str) -> Iterator[Slot]:
    """A module whose names are the stored ones below `prefix`."""
    for name, parameter in module.named_parameters():
        yield _plain(f"{prefix}.{name}", parameter)


def backbone_slots(backbone: Backbone, checkpoint: Checkpoint) -> Iterator[Slot]:
    yield _plain("model.wte.weight", backbone.embed.weight)
    for index, layer in enumerate(backbone.layers):
        yield from _layer_slots(layer, f"model.layers.{index}", checkpoint)


def head_slots(head: TextHead) -> Iterator[Slot]:
    yield _plain("model.ln_f.weight", head.norm.weight)
    yield _plain("lm_head.weight", head.head.weight)


def _plain(name: str, parameter: Tensor) -> Slot:
    def write(stored: Tensor) -> None:
        parameter.copy_(stored)

    return Slot(name, tuple(parameter.shape), write)


def _layer_slots(layer: Any, prefix: str, checkpoint: Checkpoint) -> Iterator[Slot]:
    attention, moe = layer.self_attn, layer.mlp
    yield _plain(f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight)
    yield _plain(f"{prefix}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight)
    yield _grouped(f"{prefix}.self_attn.qkv_proj.weight", attention, checkpoint)
    yield _plain(f"{prefix}.self_attn.o_proj.weight", attention.o_proj.weight)
    yield _plain(f"{prefix}.self_attn.query_layernorm.weight", attention.query_layernorm.weight)
    yield _plain(f"{prefix}.self_attn.key_layernorm.weight", attention.key_layernorm.weight)
    yield _plain(f"{prefix}.mlp.gate.wg.weight", moe.gate.wg.weight)
    shared = moe.shared_mlp
    yield _halves(f"{prefix}.mlp.shared_mlp.gate_and_up_proj.weight", shared.gate_proj.weight, shared.up_proj.weight)
    yield _plain(f"{prefix}.mlp.shared_mlp.down_proj.weight", shared.down_proj.weight)
    experts = moe.experts
    for index in range(checkpoint.experts):
        gate, up = experts.gate_up_proj[index].chunk(2)
        yield _halves(f"{prefix}.mlp.experts.{index}.gate_and_up_proj.weight", gate, up)
        yield _plain(f"{prefix}.mlp.experts.{index}.down_proj.weight", experts.down_proj[index])


def _halves(name: str, gate: Tensor, up: Tensor) -> Slot:
    """Stored with the up half first."""

    def write(stored: Tensor) -> None:
        first, second = stored.chunk(2)
        up.copy_(first)
        gate.copy_(second)

    return Slot(name, (gate.shape[0] + up.shape[0], gate.shape[1]), write)


def _grouped(name: str, attention: Any, checkpoint: Checkpoint) -> Slot:
    """Stored per key/value head: its query heads, then key, then value."""
    kv, group = checkpoint.kv_heads, checkpoint.heads // checkpoint.kv_heads

    def write(stored: Tensor) -> None:
        heads = stored.view(kv, group + 2, checkpoint.head_dim, checkpoint.hidden)
        for projection, rows in (
            (attention.q_proj, heads[:, :group]),
            (attention.k_proj, heads[:, group]),
            (attention.v_proj, heads[:, group + 1]),
        ):
            projection.weight.copy_(rows.reshape(projection.weight.shape))

    return Slot(name, (kv * (group + 2) * checkpoint.head_dim, checkpoint.hidden), write)
