"""What the stages take of memory: the components that each loads. Torch-free."""

from __future__ import annotations

from pathlib import Path

from omnistage.config.footprint import Footprint, Weights
from omnistage.config.model import OmniConfig, StageConfig
from omnistage.models.minimax_h3.checkpoint import FLOAT32_PARTS, PARTITIONS, conditioner_key
from omnistage.models.weight_files import TEXT_EXTRA_MB, TensorHeader, joined, loaded, read_json, tensors_of
from omnistage.models.working_memory import Layer, denoising_step, kernels

_CODECS = ("vae", "audio_vae")
_BESIDE = {
    ("default", "diffusion"): ("text_encoder", *_CODECS),
    ("split", "encoder"): ("text_encoder", *_CODECS),
    ("split", "decoder"): _CODECS,
}


def footprint(config: OmniConfig, stage: StageConfig) -> Footprint:
    """Of two transformers of which each is loaded at its first use both count. Raises WeightError."""
    folder = Path(config.model_path)
    names = _BESIDE.get((config.variant, stage.name), ())
    served: list[str] = []
    if stage.name == "diffusion":
        wanted = stage.options["partition"]
        served = [name for name in PARTITIONS if wanted in ("auto", "both", name) and (folder / name).is_dir()]
        names = (*served, *names)
    return Footprint(
        weights={name: _component(folder / name, stage.dtype) for name in names},
        extra={"tokenizer, code": TEXT_EXTRA_MB << 20},
        working=kernels(stage, "plain") + max((_step(folder / name, stage) for name in served), default=0),
        library="diffusers",
        dtype=stage.dtype,
    )


def _step(folder: Path, stage: StageConfig) -> int:
    sizes = read_json(folder / "config.json")
    heads = int(sizes["num_attention_heads"])
    layer = Layer(int(sizes["hidden_size"]), heads, heads, int(sizes["attention_head_dim"]), int(sizes["ffn_dim"]))
    return denoising_step(layer, stage)


def _component(folder: Path, dtype: str) -> Weights:
    tensors = tensors_of(folder)
    if folder.name == "text_encoder":
        return loaded([tensor for tensor in tensors if conditioner_key(tensor.name) is not None], dtype)
    exact = [tensor for tensor in tensors if _stays_float32(tensor, folder.name)]
    return joined([loaded(exact, "float32"), loaded([each for each in tensors if each not in exact], dtype)])


def _stays_float32(tensor: TensorHeader, component: str) -> bool:
    parts = FLOAT32_PARTS[component]
    return not parts or not set(tensor.name.split(".")).isdisjoint(parts)
