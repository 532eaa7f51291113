"""What the stages take of memory: of the transformer each loads only the tower that it runs. Torch-free."""

from __future__ import annotations

from pathlib import Path

from omnistage.config.footprint import Footprint, Weights, Working
from omnistage.config.model import OmniConfig, StageConfig
from omnistage.models.cosmos3.checkpoint import FLOAT32_PREFIX, MAX_PIXELS, Tower, read_checkpoint, tower_of
from omnistage.models.weight_files import (
    TEXT_EXTRA_MB,
    joined,
    kv_shape,
    loaded,
    read_json,
    tensors_of,
)
from omnistage.models.working_memory import ar_step, at_once, denoising_step, fullest, kernels, layer_of

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
        kv = kv_shape(text)
        step = ar_step(layer_of(text), int(text["vocab_size"]), stage, kv.max_model_len)
        working = fullest(step, beside=kernels(stage, "plain"))
        return Footprint(weights=weights, kv=kv, extra=_EXTRA, working=working, dtype=stage.dtype)
    weights = {"transformer": _transformer(folder / "transformer", stage.name, stage.dtype)}
    if stage.name != "reasoner":
        names = ("vae", "sound_tokenizer") if read_checkpoint(folder).sound_dim else ("vae",)
        weights |= {name: loaded(tensors_of(folder / name), stage.dtype) for name in names}
    step = denoising_step(layer_of(read_json(folder / "transformer" / "config.json")), stage)
    if stage.name != "reasoner":
        step = at_once(step, _picture(folder, stage))
    cache = int(stage.options.get("reasoner_cache_mb", 0)) << 20
    return Footprint(
        weights=weights,
        extra=_EXTRA,
        caches={"reasoner": cache} if cache else {},
        working=fullest(step, beside=kernels(stage, "plain")),
        library="diffusers",
        dtype=stage.dtype,
    )


def _picture(folder: Path, stage: StageConfig) -> Working:
    """The picture decoder on one latent frame of as many pixels as it takes at once, or as a step's rows stand for.

    At the full resolution, of the frames that a latent frame becomes: what a block adds to, its normed, activated and
    padded copies and the result; and two frames that each convolution keeps, a third more for smaller resolutions.
    """
    vae = read_json(folder / "vae" / "config.json")
    scale = int(vae["scale_factor_spatial"]) * 2
    pixels = min(MAX_PIXELS, stage.token_budget * scale * scale)
    width = int(vae.get("decoder_base_dim") or vae["base_dim"]) * int(vae["dim_mult"][0])
    frame = width * pixels // int(vae.get("patch_size") or 1) ** 2 * (4 if stage.dtype == "float32" else 2)
    kept = 2 * 2 * (int(vae["num_res_blocks"]) + 1)
    held = frame * (5 * int(vae["scale_factor_temporal"]) + kept + kept // 3)
    return Working(held, f"decoding {pixels} pixels")


def _transformer(folder: Path, stage: str, dtype: str) -> Weights:
    mine = [tensor for tensor in tensors_of(folder) if tower_of(tensor.name) in _TOWERS[stage]]
    exact = [tensor for tensor in mine if tensor.name.startswith(FLOAT32_PREFIX)]
    rest = [tensor for tensor in mine if not tensor.name.startswith(FLOAT32_PREFIX)]
    return joined([loaded(exact, "float32"), loaded(rest, dtype)])
