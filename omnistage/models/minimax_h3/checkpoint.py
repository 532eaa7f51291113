"""What a MiniMax-H3 checkpoint folder holds. Torch-free: reads JSON and the headers of weight files."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omnistage.errors import ConfigError

Partition = Literal["transformer", "transformer_ref"]
PARTITIONS: tuple[Partition, ...] = ("transformer", "transformer_ref")

_INDEXES = ("modular_model_index.json", "model_index.json")
_CLASSES = {
    "transformer": "MiniMaxH3Transformer3DModel",
    "transformer_ref": "MiniMaxH3Transformer3DModel",
    "vae": "AutoencoderKLMiniMaxH3",
    "audio_vae": "AutoencoderKLMiniMaxH3Audio",
}
_MAX_HEADER_BYTES = 100 << 20
_TRANSFORMER_FLOAT32 = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out", "rope")
# Parts of a component that stay float32 whatever the stage's dtype is (modules by name), as the checkpoint's are; none
# named: all do.
FLOAT32_PARTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(PARTITIONS, _TRANSFORMER_FLOAT32),
    "vae": ("encoder", "quant_conv", "norm1", "norm2", "norm_out", "scale1", "scale2"),
    "audio_vae": (),
}
# The hidden state after this many layers conditions the transformer; the layers above are not loaded.
TEXT_LAYERS = 50


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Sizes of a checkpoint.

    `spatial`: pixels per latent side; `clip_frames` pixel frames are encoded into `clip_latents` latents at a time.
    `canvas_*` and `reference_short_edge` are the geometry rules in pixels. `hop`: samples per audio latent.
    """

    folder: Path
    partitions: tuple[Partition, ...]
    canvas_short_edge: int
    canvas_max_pixels: int
    reference_short_edge: int
    channels: int
    audio_channels: int
    patch: tuple[int, int, int]
    spatial: int
    clip_frames: int
    clip_latents: int
    sample_rate: int
    hop: int
    flow_shift: float
    audio_flow_shift: float

    @property
    def multiple(self) -> int:
        """What height and width must be a multiple of, in pixels."""
        return self.spatial * self.patch[2]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Raises ConfigError naming the component whose configuration is missing, broken or of another kind."""
    index = _index(folder)
    partitions = tuple(name for name in PARTITIONS if (folder / name).is_dir())
    if not partitions:
        raise ConfigError("minimax_h3: the folder has neither transformer nor transformer_ref")
    transformer = component_config(folder, partitions[0])
    vae, audio = component_config(folder, "vae"), component_config(folder, "audio_vae")
    clip = int(vae.get("clip_length", 17))
    factors = vae.get("spatial_downsample_factors", (2, 2, 2, 2, 1, 1))
    patch = transformer.get("patch_size", (1, 2, 2))
    return Checkpoint(
        folder=folder,
        partitions=partitions,
        canvas_short_edge=int(index.get("canvas_short_edge", 768)),
        canvas_max_pixels=int(index.get("canvas_max_pixels", 768 * 1344)),
        reference_short_edge=int(index.get("reference_image_short_edge", 2048)),
        channels=int(vae.get("latent_channels", 24)),
        audio_channels=int(audio.get("latent_channels", 32)),
        patch=(int(patch[0]), int(patch[1]), int(patch[2])),
        spatial=math.prod(factors),
        clip_frames=clip,
        clip_latents=-(-clip // math.prod(vae.get("temporal_downsample_factors", (1, 2, 2, 1, 1, 1)))),
        sample_rate=int(audio.get("sampling_rate", 32000)),
        hop=math.prod(audio.get("encoder_rates", (2, 4, 4, 5, 5))),
        flow_shift=_shift(folder, "scheduler", 12.0),
        audio_flow_shift=_shift(folder, "audio_scheduler", 3.0),
    )


def component_config(folder: Path, name: str) -> dict[str, Any]:
    """The configuration of one model component, its class checked. Raises ConfigError."""
    config = read_json(folder / name / "config.json")
    expected = _CLASSES[name]
    if config.get("_class_name", expected) != expected:
        raise ConfigError(f"minimax_h3: component {name} is a {config['_class_name']}, not a {expected}")
    return config


def weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors files of a component, each complete as far as its header tells.

    Raises ConfigError naming component and file for a missing, cut or damaged one.
    """
    files = sorted((folder / name).glob("*.safetensors"))
    shards = [set(read_json(file)["weight_map"].values()) for file in (folder / name).glob("*.safetensors.index.json")]
    missing = sorted(set().union(*shards) - {file.name for file in files})
    if missing or not files:
        raise ConfigError(f"minimax_h3: component {name} lacks {missing[0] if missing else 'its .safetensors file'}")
    for file in files:
        _check_header(name, file)
    return files


def _check_header(name: str, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as content:
        (length,) = struct.unpack("<Q", content.read(8).ljust(8, b"\xff"))
        header = content.read(length) if length <= min(size, _MAX_HEADER_BYTES) else b""
    try:
        tensors = json.loads(header)
        end = max(entry["data_offsets"][1] for key, entry in tensors.items() if key != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"minimax_h3: {name}/{file.name} is no readable safetensors file; fetch it again") from None
    if 8 + length + end != size:
        raise ConfigError(f"minimax_h3: {name}/{file.name} is cut or damaged; fetch it again")


def _index(folder: Path) -> dict[str, Any]:
    for name in _INDEXES:
        if (folder / name).is_file():
            return read_json(folder / name)
    raise ConfigError(f"minimax_h3: the folder has none of {', '.join(_INDEXES)}")


def _shift(folder: Path, name: str, default: float) -> float:
    shift = float(read_json(folder / name / "scheduler_config.json").get("shift", default))
    if not shift > 0:
        raise ConfigError(f"minimax_h3: {name} has the shift {shift}, which must be positive")
    return shift


def conditioner_key(key: str) -> str | None:
    """The name in a `Qwen3VLModel` of a weight of the whole model; None for the head and the layers not used."""
    inner = key.removeprefix("model.")
    parts = inner.split(".")
    if parts[:2] == ["language_model", "layers"] and int(parts[2]) >= TEXT_LAYERS:
        return None
    return None if inner == key else inner


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError naming the file by its folder and name."""
    what = f"{file.parent.name}/{file.name}"
    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"minimax_h3: cannot read {what}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"minimax_h3: {what} is no valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"minimax_h3: {what} is no JSON object")
    return content
