"""Loads the text encoder and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLModel
from transformers.initialization import no_init_weights

from omnistage.errors import ConfigError
from omnistage.models.minimax_h3.checkpoint import TEXT_LAYERS, conditioner_key, read_json, weight_files
from omnistage.models.minimax_h3.loading import fill, read_weights
from omnistage.ops.pretrained import load_auto_tokenizer


def load_text_encoder(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The first 50 layers of the Qwen3-VL conditioner, its final norm taken off: the last state is state 50."""
    name = "text_encoder"
    files = weight_files(folder, name)
    read_json(folder / name / "config.json")
    config = Qwen3VLConfig.from_pretrained(str(folder / name), local_files_only=True)
    layers = config.text_config.num_hidden_layers
    if layers <= TEXT_LAYERS:
        raise ConfigError(f"minimax_h3: text_encoder has {layers} layers; more than {TEXT_LAYERS} are needed")
    config.text_config.num_hidden_layers = TEXT_LAYERS
    with no_init_weights():
        model: Any = Qwen3VLModel(config)
    fill(model, name, read_weights(name, files, conditioner_key), dtype)
    model.language_model.norm = nn.Identity()
    return model.to(device)


def load_tokenizer(folder: Path) -> Any:
    """The text encoder's tokenizer."""
    return load_auto_tokenizer(folder / "tokenizer")
