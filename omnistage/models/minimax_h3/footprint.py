"""What the stages take of memory: the components that each loads. Torch-free."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from omnistage.config.footprint import Footprint, Weights, Working
from omnistage.config.model import OmniConfig, StageConfig
from omnistage.models.minimax_h3 import geometry
from omnistage.models.minimax_h3.ask import DEFAULT_FRAMES
from omnistage.models.minimax_h3.checkpoint import (
    FLOAT32_PARTS,
    PARTITIONS,
    Checkpoint,
    conditioner_key,
    read_checkpoint,
)
from omnistage.models.weight_files import TEXT_EXTRA_MB, TensorHeader, joined, loaded, read_json, tensors_of
from omnistage.models.working_memory import Layer, at_once, denoising_step, fullest, kernels

# Pixels along a side of what the library's autoencoder takes at once.
_TILE = 256
# Of a tensor in a residual unit: what it is added to, the input, its padded and activated copies, and in and out of a
# convolution in the order of its kernel.
_COPIES = 6
_CODECS = ("vae", "audio_vae")
# MiB, measured: code that a stage without text has once it is ready, and what the first step of a denoiser brings.
_CODE_MB, _FIRST_STEP_MB = 20, 25
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
    late = served if stage.options.get("partition") == "auto" else []
    reads_text = "text_encoder" in names
    first = 0 if reads_text or not served else _FIRST_STEP_MB << 20
    return Footprint(
        weights={name: _component(folder / name, stage.dtype, late=name in late) for name in names},
        extra={"tokenizer, code": TEXT_EXTRA_MB << 20} if reads_text else {"code": _CODE_MB << 20},
        working=fullest(_step(folder, stage, served, names), beside=kernels(stage, "plain") + first),
        library="diffusers",
        dtype=stage.dtype,
    )


def _step(folder: Path, stage: StageConfig, served: list[str], names: tuple[str, ...]) -> Working:
    checkpoint = read_checkpoint(folder)
    steps = [
        _denoising(folder / name, stage) for name in served or ([PARTITIONS[0]] if stage.name == "diffusion" else [])
    ]
    denoising = fullest(*steps)
    if stage.name == "encoder":
        return _encoding(checkpoint)
    if "vae" not in names:
        return denoising
    decoding = fullest(_pictures(checkpoint, stage), _sound(checkpoint))
    if stage.name == "decoder":
        return decoding
    return at_once(fullest(denoising, _encoding(checkpoint)), decoding)


def _denoising(folder: Path, stage: StageConfig) -> Working:
    sizes = read_json(folder / "config.json")
    heads = int(sizes["num_attention_heads"])
    layer = Layer(int(sizes["hidden_size"]), heads, heads, int(sizes["attention_head_dim"]), int(sizes["ffn_dim"]))
    return denoising_step(layer, stage)


def _pictures(checkpoint: Checkpoint, stage: StageConfig) -> Working:
    """A clip of the default size and length: decoded pieces, of which only a part is used, and the whole of them; or
    beside the pieces a tile in the decoder's layers."""
    frames = geometry.aligned_frames(DEFAULT_FRAMES, checkpoint.clip_frames, checkpoint.clip_latents)
    sizes = read_json(checkpoint.folder / "vae" / "config.json")
    heads, head_dim = int(sizes["decoder_num_attention_heads"]), int(sizes["decoder_attention_head_dim"])
    width = heads * head_dim
    layer = Layer(width, heads, heads, head_dim, int(sizes["decoder_ffn_mult"]) * width)
    latents = checkpoint.clip_latents + -int(sizes.get("token_drop", 3)) % checkpoint.clip_latents
    tile = layer.nbytes(latents * (_TILE // checkpoint.spatial) ** 2, stage.dtype)
    clip = 3 * frames * checkpoint.canvas_max_pixels * (4 if stage.dtype == "float32" else 2)
    pieces = (
        clip
        * latents
        * math.prod(sizes.get("temporal_downsample_factors", (1, 2, 2, 1, 1, 1)))
        // checkpoint.clip_frames
    )
    return Working(pieces + max(clip, tile), f"decoding {frames} frames")


def _sound(checkpoint: Checkpoint) -> Working:
    """The sound of a clip of the default length at the decoder's widest level, in float32, both channels."""
    sizes = read_json(checkpoint.folder / "audio_vae" / "config.json")
    latents, width = geometry.STEREO * geometry.audio_latents(DEFAULT_FRAMES), int(sizes["decoder_dim"])
    rates = [int(rate) for rate in sizes["decoder_rates"]]
    widest = max((width >> level) * math.prod(rates[:level]) for level in range(len(rates) + 1))
    return Working(_COPIES * 4 * latents * widest, "decoding sound")


def _encoding(checkpoint: Checkpoint) -> Working:
    """A reference video of the default length in the encoder: its pixels and those with the last clip filled up, and
    the widest level of a tile of one clip, in float32."""
    sizes = read_json(checkpoint.folder / "vae" / "config.json")
    pixels = min(_TILE**2, checkpoint.canvas_max_pixels)
    video = 3 * geometry.aligned_frames(DEFAULT_FRAMES, checkpoint.clip_frames, 0) * checkpoint.canvas_max_pixels
    tile = _COPIES * int(sizes["block_out_channels"][0]) * checkpoint.clip_frames * pixels
    return Working(4 * (2 * video + tile), "encoding a video")


def _component(folder: Path, dtype: str, *, late: bool) -> Weights:
    tensors = tensors_of(folder)
    if folder.name == "text_encoder":
        return loaded([tensor for tensor in tensors if conditioner_key(tensor.name) is not None], dtype)
    exact = [tensor for tensor in tensors if _stays_float32(tensor, folder.name)]
    parts = joined([loaded(exact, "float32"), loaded([each for each in tensors if each not in exact], dtype)])
    return msgspec.structs.replace(parts, late=late)


def _stays_float32(tensor: TensorHeader, component: str) -> bool:
    parts = FLOAT32_PARTS[component]
    return not parts or not set(tensor.name.split(".")).isdisjoint(parts)
