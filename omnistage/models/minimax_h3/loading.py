"""Loads the components of a checkpoint, each only where it is needed.

Every weight of a file is checked against the module before it is used: a missing, surplus or misshapen one is a
ConfigError that names the component. No component is ever fetched from a hub.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from omnistage.errors import ConfigError
from omnistage.models.minimax_h3.checkpoint import FLOAT32_PARTS, Partition, component_config, weight_files
from omnistage.ops.pretrained import make_resident


def load_transformer(folder: Path, name: Partition, dtype: torch.dtype, device: torch.device) -> Any:
    """A `MiniMaxH3Transformer3DModel`."""
    return _load(MiniMaxH3Transformer3DModel, folder, name, dtype, FLOAT32_PARTS[name]).to(device)


def load_vae(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The `AutoencoderKLMiniMaxH3` of pictures, tiling as the library has it."""
    return _load(AutoencoderKLMiniMaxH3, folder, "vae", dtype, FLOAT32_PARTS["vae"]).to(device)


def load_audio_vae(folder: Path, device: torch.device) -> Any:
    """The `AutoencoderKLMiniMaxH3Audio`, float32."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*weight_norm.*", category=FutureWarning)  # the library's own choice
        return _load(AutoencoderKLMiniMaxH3Audio, folder, "audio_vae", torch.float32).to(device)


def _load(kind: Any, folder: Path, name: str, dtype: torch.dtype, float32: tuple[str, ...] = ()) -> Any:
    files = weight_files(folder, name)
    config = {key: value for key, value in component_config(folder, name).items() if not key.startswith("_")}
    # Parameters are replaced below; left uninitialised, their memory is never touched. Computed buffers are real.
    with no_init_weights():
        model = kind.from_config(config)
    fill(model, name, read_weights(name, files, lambda key: key), dtype, float32)
    return model


def read_weights(name: str, files: list[Path], rename: Callable[[str], str | None]) -> dict[str, Tensor]:
    """The weights that `rename` has a name for, by that name."""
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= _selected(file, rename)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"minimax_h3: {name}/{file.name} cannot be read: {error}") from None
    return weights


def _selected(file: Path, rename: Callable[[str], str | None]) -> dict[str, Tensor]:
    with safe_open(str(file), framework="pt") as content:
        names = {key: rename(key) for key in content.keys()}  # noqa: SIM118 - not a mapping
        return {new: content.get_tensor(key) for key, new in names.items() if new is not None}


def fill(
    model: nn.Module, name: str, weights: dict[str, Tensor], dtype: torch.dtype, float32: tuple[str, ...] = ()
) -> None:
    """Puts the weights into the module in the place of its own, those named in `float32` in that type.

    Raises ConfigError when they do not fit.
    """
    _check(name, weights, model.state_dict())
    cast = {key: _cast(tensor, torch.float32 if _is_in(key, float32) else dtype) for key, tensor in weights.items()}
    model.load_state_dict(cast, assign=True)
    model.eval().requires_grad_(False)
    make_resident(model)


def _is_in(key: str, parts: tuple[str, ...]) -> bool:
    return not set(key.split(".")).isdisjoint(parts)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _check(component: str, weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    missing, surplus = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing:
        raise ConfigError(f"minimax_h3: component {component} lacks {len(missing)} weights, among them {missing[0]}")
    if surplus:
        raise ConfigError(f"minimax_h3: component {component} has a weight {surplus[0]} that its configuration lacks")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise ConfigError(
                f"minimax_h3: {component} weight {name} is {list(tensor.shape)}, its configuration says "
                f"{list(expected[name].shape)}"
            )
