"""What a Cosmos3 checkpoint folder says about itself. Torch-free: reads the JSON files only."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omnistage.errors import ConfigError

TASK_STEPS = 35
MODULAR_STEPS = 50
_SCHEDULERS = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")

Tower = Literal["both", "understanding", "generation"]

_UNDERSTANDING_ATTENTION = frozenset({"to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k", "k_norm_und_for_gen"})
_UNDERSTANDING_LAYER = frozenset({"input_layernorm", "post_attention_layernorm", "mlp"})
_UNDERSTANDING_TOP = frozenset({"embed_tokens", "norm"})
_UNUSED = frozenset({"lm_head"})
# Pixels of one frame, over all requests of a call: the decoder holds a frame's activations of every one of them.
MAX_PIXELS = 1 << 20
# Computed in float32 whatever the dtype of the rest.
FLOAT32_PREFIX = "time_embedder."


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Sizes and switches. `spatial` / `temporal`: pixels and frames per latent; `sound_hop` samples per sound latent.

    `action_dim` and `sound_dim` are 0 where the checkpoint has no such head. `distilled_sigmas` is empty for base
    checkpoints; a distilled one has a fixed schedule and guidance built in.
    """

    folder: Path
    transformer: dict[str, Any]
    scheduler: dict[str, Any]
    spatial: int
    temporal: int
    channels: int
    patch: int
    action_dim: int
    sound_dim: int
    sound_rate: int
    sound_hop: int
    sound_latent_fps: float
    distilled_sigmas: tuple[float, ...]
    default_steps: int
    default_system_prompt: bool
    native_schedule: bool
    wants_safety_checker: bool

    @property
    def is_distilled(self) -> bool:
        return bool(self.distilled_sigmas)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Raises ConfigError naming the component whose configuration is missing, broken or of an unknown kind."""
    index, modular = _optional(folder / "model_index.json"), _optional(folder / "modular_model_index.json")
    if not index and not modular:
        raise ConfigError("cosmos3: the folder has neither model_index.json nor modular_model_index.json")
    switches = modular | index
    transformer = _component(folder, "transformer", "Cosmos3OmniTransformer")
    vae = _component(folder, "vae", "AutoencoderKLWan")
    sound = _sound(folder)
    scheduler = _read(folder / "scheduler" / "scheduler_config.json")
    if scheduler.get("_class_name") not in _SCHEDULERS:
        raise ConfigError(f"cosmos3: scheduler {scheduler.get('_class_name')!r} is not one of {', '.join(_SCHEDULERS)}")
    return Checkpoint(
        folder=folder,
        transformer=transformer,
        scheduler=scheduler,
        spatial=int(vae.get("scale_factor_spatial", 16)),
        temporal=int(vae.get("scale_factor_temporal", 4)),
        channels=int(transformer.get("latent_channel", 48)),
        patch=int(transformer.get("latent_patch_size", 2)),
        action_dim=int(transformer.get("action_dim") or 0) if transformer.get("action_gen") else 0,
        sound_dim=int(transformer.get("sound_dim") or 0) if transformer.get("sound_gen") and sound else 0,
        sound_rate=int(sound.get("sampling_rate", 48000)),
        sound_hop=int(sound.get("hop_size") or math.prod(sound.get("dec_strides", [1]))),
        sound_latent_fps=float(transformer.get("sound_latent_fps", 25.0)),
        distilled_sigmas=_sigmas(switches),
        default_steps=TASK_STEPS if index else MODULAR_STEPS,
        default_system_prompt=bool(switches.get("default_use_system_prompt", True)),
        native_schedule=bool(switches.get("use_native_flow_schedule", False)),
        wants_safety_checker=bool(switches.get("enable_safety_checker", True)),
    )


def _sound(folder: Path) -> dict[str, Any]:
    """The sound tokenizer's configuration; empty when the checkpoint has none."""
    if not (folder / "sound_tokenizer").is_dir():
        return {}
    return _component(folder, "sound_tokenizer", "Cosmos3AVAEAudioTokenizer")


def _sigmas(switches: dict[str, Any]) -> tuple[float, ...]:
    if not switches.get("is_distilled"):
        return ()
    sigmas = tuple(float(sigma) for sigma in switches.get("distilled_sigmas") or ())
    if not sigmas:
        raise ConfigError("cosmos3: the index says is_distilled but gives no distilled_sigmas")
    return sigmas


def _component(folder: Path, name: str, expected: str) -> dict[str, Any]:
    config = _read(folder / name / "config.json")
    if config.get("_class_name", expected) != expected:
        raise ConfigError(f"cosmos3: component {name} is a {config['_class_name']}, not a {expected}")
    return config


def _optional(file: Path) -> dict[str, Any]:
    return _read(file) if file.is_file() else {}


def _read(file: Path) -> dict[str, Any]:
    what = f"{file.parent.name}/{file.name}"
    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cosmos3: cannot read {what}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"cosmos3: {what} is no valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"cosmos3: {what} is no JSON object")
    return content


def tower_of(name: str) -> Tower | None:
    """The tower that the transformer weight `name` belongs to; None for the text head, which nothing here reads."""
    parts = name.split(".")
    if parts[0] in _UNUSED:
        return None
    if parts[0] != "layers":
        return "understanding" if parts[0] in _UNDERSTANDING_TOP else "generation"
    part = parts[3] if parts[2] == "self_attn" else parts[2]
    known = _UNDERSTANDING_ATTENTION if parts[2] == "self_attn" else _UNDERSTANDING_LAYER
    return "understanding" if part in known else "generation"
