"""What the stages take of memory: of the transformer each loads only the tower that it runs. Torch-free."""

from __future__ import annotations

from pathlib import Path

from omnistage.config.footprint import Footprint, Weights
from omnistage.config.model import OmniConfig, StageConfig
from omnistage.models.cosmos3.checkpoint import FLOAT32_PREFIX, Tower, read_checkpoint, tower_of
from omnistage.models.weight_files import (
    TEXT_EXTRA_MB,
    joined,
    kv_shape,
    loaded,
    read_json,
    tensors_of,
)

_TOWERS: dict[str, tuple[Tower, ...]] = {
    "diffusion": ("understanding", "generation"),
    "reasoner": ("understanding",),
    "generator": ("generation",),
}
_EXTRA = {"tokenizer, code": TEXT_EXTRA_MB << 20}


def footprint(config: OmniConfig, stage: StageConfig) -> Footprint:
    """Raises WeightError or ConfigError for a damaged checkpoint."""
    folder = Path(config.model_path)
    if config.variant == "answers":
        text = read_json(folder / "config.json").get("text_config", {})
        weights = {"reasoner": loaded(tensors_of(folder), stage.dtype)}
        return Footprint(weights=weights, kv=kv_shape(text), extra=_EXTRA, dtype=stage.dtype)
    weights = {"transformer": _transformer(folder / "transformer", stage.name, stage.dtype)}
    if stage.name != "reasoner":
        names = ("vae", "sound_tokenizer") if read_checkpoint(folder).sound_dim else ("vae",)
        weights |= {name: loaded(tensors_of(folder / name), stage.dtype) for name in names}
    cache = int(stage.options.get("reasoner_cache_mb", 0)) << 20
    extra = _EXTRA | ({"reasoner cache, at most": cache} if cache else {})
    return Footprint(weights=weights, extra=extra, library="diffusers", dtype=stage.dtype)


def _transformer(folder: Path, stage: str, dtype: str) -> Weights:
    mine = [tensor for tensor in tensors_of(folder) if tower_of(tensor.name) in _TOWERS[stage]]
    exact = [tensor for tensor in mine if tensor.name.startswith(FLOAT32_PREFIX)]
    rest = [tensor for tensor in mine if not tensor.name.startswith(FLOAT32_PREFIX)]
    return joined([loaded(exact, "float32"), loaded(rest, dtype)])
