"""What a Qwen3-Omni checkpoint folder says about itself, read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omnistage.errors import ConfigError


def read_config(path: str) -> dict[str, Any]:
    """The folder's config.json. Raises ConfigError when there is none."""
    file = Path(path) / "config.json"
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file.name} of the model folder cannot be read: {error}", param="model") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file.name} of the model folder is no JSON object", param="model")
    return content


def has_talker(path: str) -> bool:
    """True for checkpoints that can speak."""
    config = read_config(path)
    return bool(config.get("enable_audio_output", True)) and "talker_config" in config
