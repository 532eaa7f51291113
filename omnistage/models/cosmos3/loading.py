"""Loads the components of a Cosmos3 checkpoint; of the transformer only the tower that a stage needs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, Cosmos3AVAEAudioTokenizer, Cosmos3OmniTransformer
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from omnistage.errors import ConfigError
from omnistage.models.cosmos3.checkpoint import FLOAT32_PREFIX, Checkpoint, Tower, tower_of
from omnistage.ops.pretrained import load_auto_tokenizer, make_resident

logger = logging.getLogger(__name__)


def load_transformer(checkpoint: Checkpoint, tower: Tower, dtype: torch.dtype, device: torch.device) -> Any:
    """A `Cosmos3OmniTransformer` with the weights of one tower or both; the others stay on the meta device.

    Raises ConfigError naming what is missing, unknown or of another shape.
    """
    with torch.device("meta"):
        model = Cosmos3OmniTransformer.from_config(_without_class(checkpoint.transformer))
    wanted = {name for name in model.state_dict() if tower_of(name) is not None}
    if tower != "both":
        wanted = {name for name in wanted if tower_of(name) == tower}
    weights = _read_weights(checkpoint.folder / "transformer", device, wanted)
    _check("transformer", wanted, weights, model.state_dict())
    cast = {name: _cast(name, tensor, dtype) for name, tensor in weights.items()}
    model.load_state_dict(cast, strict=False, assign=True)
    config = model.config
    rotary = type(model.rotary_emb)(
        head_dim=config.head_dim, rope_theta=config.rope_theta, rope_axes_dim=config.rope_axes_dim
    )
    model.rotary_emb = rotary.to(device)  # its buffer is computed, not stored
    return _frozen(model)


def load_vae(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    """The `AutoencoderKLWan` of pictures."""
    return _load("vae", AutoencoderKLWan, checkpoint.folder / "vae", dtype, device)


def load_sound(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    """The `Cosmos3AVAEAudioTokenizer` of sound."""
    return _load("sound_tokenizer", Cosmos3AVAEAudioTokenizer, checkpoint.folder / "sound_tokenizer", dtype, device)


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The text tokenizer with its chat template. Raises ConfigError when it is missing or lacks a needed token."""
    tokenizer = load_auto_tokenizer(checkpoint.folder / "text_tokenizer")
    if tokenizer.eos_token_id is None or "<|vision_start|>" not in tokenizer.get_vocab():
        raise ConfigError("cosmos3: text_tokenizer needs an end token and <|vision_start|>")
    return tokenizer


def warn_about_safety(checkpoint: Checkpoint) -> None:
    """Says once, at start, that a checkpoint's wish for a safety checker is not met."""
    if checkpoint.wants_safety_checker:
        logger.warning(
            "cosmos3: the checkpoint asks for a safety checker; none is part of OmniStage, nothing is checked"
        )


def _load(component: str, module: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    model = module.from_config(module.load_config(str(folder)))
    expected = model.state_dict()
    weights = _read_weights(folder, torch.device("cpu"), None)
    _check(component, expected.keys(), weights, expected)
    cast = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
    model.load_state_dict(cast, assign=True)
    return _frozen(model.to(device))


def _frozen(model: nn.Module) -> nn.Module:
    make_resident(model)
    return model.eval().requires_grad_(False)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(torch.float32 if name.startswith(FLOAT32_PREFIX) else dtype)


def _without_class(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("_")}


def _read_weights(folder: Path, device: torch.device, wanted: set[str] | None) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a component, restricted to `wanted` names."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"cosmos3: component {folder.name} has no .safetensors file")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= _read_file(file, device, wanted)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cosmos3: {folder.name}/{file.name} cannot be read: {error}") from None
    return weights


def _read_file(file: Path, device: torch.device, wanted: set[str] | None) -> dict[str, Tensor]:
    with safe_open(str(file), framework="pt", device=str(device)) as content:
        names = [name for name in content.keys() if wanted is None or name in wanted]  # noqa: SIM118 - no mapping
        return {name: content.get_tensor(name) for name in names}


def _check(component: str, wanted: Iterable[str], got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    missing = sorted(set(wanted) - got.keys())
    if missing:
        raise ConfigError(f"cosmos3: component {component} lacks {len(missing)} weights, among them {missing[0]}")
    for name, tensor in got.items():
        if name not in expected:
            raise ConfigError(f"cosmos3: component {component} has a weight {name} that its configuration does not")
        if tensor.shape != expected[name].shape:
            raise ConfigError(
                f"cosmos3: {component} weight {name} is {list(tensor.shape)}, its configuration says "
                f"{list(expected[name].shape)}"
            )
