"""What the stages take of memory: components of one checkpoint, which stages of a process share. Torch-free."""

from __future__ import annotations

from pathlib import Path

from omnistage.config.footprint import Footprint, KvShape, Weights
from omnistage.config.model import OmniConfig, StageConfig
from omnistage.models.hunyuan_image3.checkpoint import Checkpoint, read_checkpoint
from omnistage.models.weight_files import TEXT_EXTRA_MB, copied, joined, tensors_of
from omnistage.models.working_memory import Layer, ar_step, denoising_step, kernels

_PREFIXES = {
    "backbone": ("model.wte.", "model.layers."),
    "text_head": ("model.ln_f.", "lm_head."),
    "vae.encoder": ("vae.encoder.",),
    "vae.decoder": ("vae.decoder.",),
    "vision": ("vision_model.", "vision_aligner."),
    "patch_embed": ("patch_embed.",),
    "final_layer": ("final_layer.",),
    "times": ("time_embed.", "timestep_emb."),
    "drawing_times": ("time_embed_2.",),
    "guidance": ("guidance_emb.",),
    "next_time": ("timestep_r_emb.",),
}
_READING = ("backbone", "vae.encoder", "vision", "patch_embed", "times")
_DRAWING = (*_READING, "vae.decoder", "final_layer", "drawing_times")
# The router's and the autoencoder's weights stay float32.
_FLOAT32 = ("vae.encoder", "vae.decoder")
_FLOAT32_BYTES, _HALF_BYTES = 4, 2
_ROUTER = "mlp.gate.wg.weight"
_UNUSED = "vision_model.head."


def footprint(config: OmniConfig, stage: StageConfig) -> Footprint:
    """Raises WeightError or ConfigError for a damaged checkpoint."""
    folder = Path(config.model_path)
    checkpoint = read_checkpoint(folder)
    names = (*_READING, "text_head") if stage.kind == "ar" else (*_DRAWING, *_switched(checkpoint))
    return Footprint(
        weights={name: _component(folder, name, stage.dtype) for name in names},
        kv=_kv(checkpoint) if stage.kind == "ar" else None,
        extra={"tokenizer, code": TEXT_EXTRA_MB << 20},
        working=_step(checkpoint, stage) + kernels(stage, "plain"),
        library="diffusers",
        shared=True,
        dtype=stage.dtype,
    )


def _switched(checkpoint: Checkpoint) -> tuple[str, ...]:
    return ("guidance",) * checkpoint.distilled + ("next_time",) * checkpoint.meanflow


def _component(folder: Path, name: str, dtype: str) -> Weights:
    tensors = [tensor for tensor in tensors_of(folder) if tensor.name.startswith(_PREFIXES[name])]
    tensors = [tensor for tensor in tensors if not tensor.name.startswith(_UNUSED)]
    routers = [tensor for tensor in tensors if tensor.name.endswith(_ROUTER)]
    others = [tensor for tensor in tensors if not tensor.name.endswith(_ROUTER)]
    return joined([copied(routers, "float32"), copied(others, "float32" if name in _FLOAT32 else dtype)])


def _step(checkpoint: Checkpoint, stage: StageConfig) -> int:
    """Of the text stage; or of the denoiser, or of the decoder on a picture of the base size if that is more.

    The decoder holds, at the full resolution and for all frames of a latent frame, what a block adds to, its normed and
    activated copies and the result; in half precision, beside which its norms compute in float32.
    """
    layer = Layer(
        checkpoint.hidden,
        checkpoint.heads,
        checkpoint.kv_heads,
        checkpoint.head_dim,
        checkpoint.expert_width,
        experts=max(checkpoint.top_k),
        expert_inner=checkpoint.expert_width,
    )
    if stage.kind == "ar":
        return ar_step(layer, checkpoint.vocab, stage, checkpoint.max_tokens)
    frames = checkpoint.temporal * checkpoint.base_size**2
    picture = int(checkpoint.vae["block_out_channels"][0]) * frames * (2 * _FLOAT32_BYTES + 3 * _HALF_BYTES)
    return max(denoising_step(layer, stage), picture)


def _kv(checkpoint: Checkpoint) -> KvShape:
    return KvShape(
        layers=checkpoint.layers,
        kv_heads=checkpoint.kv_heads,
        head_dim=checkpoint.head_dim,
        max_model_len=checkpoint.max_tokens,
    )
