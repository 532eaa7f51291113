"""What the stages take of memory: components of one checkpoint, which stages of a process share. Torch-free."""

from __future__ import annotations

from pathlib import Path

from omnistage.config.footprint import Footprint, KvShape, Weights, Working
from omnistage.config.model import OmniConfig, StageConfig
from omnistage.models.hunyuan_image3.checkpoint import Checkpoint, read_checkpoint
from omnistage.models.weight_files import TEXT_EXTRA_MB, copied, joined, tensors_of
from omnistage.models.working_memory import Layer, ar_step, at_once, denoising_step, fullest, kernels

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
        working=fullest(_step(checkpoint, stage), beside=kernels(stage, "plain")),
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


def _step(checkpoint: Checkpoint, stage: StageConfig) -> Working:
    """Of the text stage, or of the denoiser and the picture decoder; both stages also encode reference pictures."""
    layer = Layer(
        checkpoint.hidden,
        checkpoint.heads,
        checkpoint.kv_heads,
        checkpoint.head_dim,
        checkpoint.expert_width,
        experts=max(checkpoint.top_k),
        expert_inner=checkpoint.expert_width,
    )
    picture = _picture(checkpoint, stage)
    if stage.kind == "ar":
        return fullest(ar_step(layer, checkpoint.vocab, stage, checkpoint.max_tokens), picture)
    # A guided picture of the base size; other shapes of the table have as many pixels or fewer.
    rows = 2 * ((checkpoint.base_size // checkpoint.spatial) ** 2 + 1 + checkpoint.distilled + checkpoint.meanflow)
    return at_once(denoising_step(layer, stage, rows), picture)


def _picture(checkpoint: Checkpoint, stage: StageConfig) -> Working:
    """The autoencoder at its widest level on a picture of the base size, all frames of a latent frame together.

    A block holds what it adds to, the first convolution's result, its normed and activated copies and the second
    convolution's result. A CPU convolution in float32 has its input and result in the kernel's order besides (the
    normed copy is gone by then); other devices compute in half precision, beside which norms are in float32.
    """
    exact = stage.device == "cpu" or stage.dtype == "float32"
    copies = 6 * _FLOAT32_BYTES if exact else 2 * _FLOAT32_BYTES + 3 * _HALF_BYTES
    widths = [int(width) for width in checkpoint.vae["block_out_channels"]]
    widest = max(width >> (2 * level) for level, width in enumerate(widths))
    held = widest * checkpoint.temporal * checkpoint.base_size**2 * copies
    return Working(held, f"a picture of {checkpoint.base_size} x {checkpoint.base_size}")


def _kv(checkpoint: Checkpoint) -> KvShape:
    return KvShape(
        layers=checkpoint.layers,
        kv_heads=checkpoint.kv_heads,
        head_dim=checkpoint.head_dim,
        max_model_len=checkpoint.max_tokens,
    )
