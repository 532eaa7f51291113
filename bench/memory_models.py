"""Random checkpoints of a few hundred MB in the layout of the published ones, for what processes take of memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3OmniMoeConfig

from bench.qwen3_omni_model import bench_config, write_checkpoint
from tests.models.minimax_h3.tiny import build

_HUNYUAN = Path("tests/models/hunyuan_image3/data")
HUNYUAN_WIDTH, HUNYUAN_INNER, HUNYUAN_LAYERS, HUNYUAN_EXPERTS, HUNYUAN_PATCH = 768, 640, 6, 8, 128
HUNYUAN_HEADS, HUNYUAN_KV_HEADS, HUNYUAN_HEAD_DIM = 12, 4, 64
# Hidden rows, patch rows, expert rows of the tiny checkpoint and what they become here; its head has 32 channels.
_TINY_WIDTH, _TINY_PATCH, _TINY_INNER = 64, 32, 48


def write_hunyuan_image3(folder: Path, base_size: int = 256, vae_factor: int = 2) -> None:
    """The tests' tiny HunyuanImage-3.0 widened; the autoencoder's channels by `vae_factor`."""
    shutil.copytree(_HUNYUAN, folder, ignore=shutil.ignore_patterns("reference.*", "distil_overlay", "*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": HUNYUAN_WIDTH, "moe_intermediate_size": [HUNYUAN_INNER] * HUNYUAN_LAYERS,
        "intermediate_size": HUNYUAN_INNER, "num_experts": HUNYUAN_EXPERTS, "num_hidden_layers": HUNYUAN_LAYERS,
        "moe_topk": [2] * HUNYUAN_LAYERS, "num_shared_expert": [1] * HUNYUAN_LAYERS, "head_dim": HUNYUAN_HEAD_DIM,
        "attention_head_dim": HUNYUAN_HEAD_DIM, "num_attention_heads": HUNYUAN_HEADS,
        "num_key_value_heads": HUNYUAN_KV_HEADS, "patch_embed_hidden_dim": HUNYUAN_PATCH, "image_base_size": base_size,
    }  # fmt: skip
    config["vae"]["block_out_channels"] = [vae_factor * width for width in config["vae"]["block_out_channels"]]
    config["vit_aligner"]["n_embed"] = HUNYUAN_WIDTH
    (folder / "config.json").write_text(json.dumps(config))
    words = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(words.replace("<img_size_512>", f"<img_size_{base_size}>"))
    random = torch.Generator().manual_seed(1)
    save_file(
        {name: _drawn(shape, dtype, random) for name, shape, dtype in _hunyuan_tensors(vae_factor)},
        folder / "model.safetensors",
    )


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    fan = torch.Size(shape[1:]).numel()
    drawn: Tensor = torch.randn(shape, generator=random) / fan**0.5
    return drawn.to(dtype)


def _hunyuan_tensors(vae_factor: int) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    for name, tensor in load_file(_HUNYUAN / "model.safetensors").items():
        shape = tuple(tensor.shape)
        if name.startswith("vae."):
            yield name, _wider_vae(name, shape, vae_factor), tensor.dtype
        elif not name.startswith("model.layers."):
            yield name, _wider(name, shape), tensor.dtype
        elif name.startswith("model.layers.0.") and (".experts." not in name or ".experts.0." in name):
            for each in _repeated(name):
                yield each, _wider_layer(name, shape), tensor.dtype


def _repeated(name: str) -> Iterator[str]:
    for layer in range(HUNYUAN_LAYERS):
        other = name.replace("layers.0.", f"layers.{layer}.", 1)
        experts = range(HUNYUAN_EXPERTS) if ".experts.0." in name else (0,)
        yield from (other.replace(".experts.0.", f".experts.{expert}.") for expert in experts)


def _wider_vae(name: str, shape: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """All but pixels, latents and taps."""
    fixed_out = name.startswith(("vae.decoder.conv_out", "vae.encoder.conv_out"))
    fixed_in = name in ("vae.decoder.conv_in.weight", "vae.encoder.conv_in.weight")
    outputs = shape[0] if fixed_out else factor * shape[0]
    return (outputs, *(shape[1:2] if fixed_in else [factor * size for size in shape[1:2]]), *shape[2:])


def _wider_layer(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    heads = (HUNYUAN_HEADS + 2 * HUNYUAN_KV_HEADS) * HUNYUAN_HEAD_DIM
    return {
        "qkv_proj": (heads, HUNYUAN_WIDTH),
        "o_proj": (HUNYUAN_WIDTH, HUNYUAN_HEADS * HUNYUAN_HEAD_DIM),
        "query_layernorm": (HUNYUAN_HEAD_DIM,),
        "key_layernorm": (HUNYUAN_HEAD_DIM,),
        "gate_and_up_proj": (2 * HUNYUAN_INNER, HUNYUAN_WIDTH),
        "down_proj": (HUNYUAN_WIDTH, HUNYUAN_INNER),
        "wg": (HUNYUAN_EXPERTS, HUNYUAN_WIDTH),
    }.get(name.split(".")[-2], (HUNYUAN_WIDTH,))


def _wider(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    sizes = {_TINY_WIDTH: HUNYUAN_WIDTH, _TINY_PATCH: HUNYUAN_PATCH}
    if ".emb_layers." in name:
        return (2 * (HUNYUAN_PATCH if name.startswith("final_layer.") else HUNYUAN_WIDTH), HUNYUAN_WIDTH)[: len(shape)]
    if name.startswith("vision_model."):
        return shape
    if name.startswith("vision_aligner.layers.0."):
        return (HUNYUAN_WIDTH, *shape[1:])
    return tuple(sizes.get(size, size) for size in shape)


# A canvas of 256 x 448 in the default ratio.
MINIMAX_H3: dict[str, dict[str, Any]] = {
    "transformer": {
        "num_attention_heads": 8, "attention_head_dim": 64, "hidden_size": 512, "num_layers": 6, "ffn_dim": 1408,
        "time_embed_dim": 128, "rope_freq_dim": 8,
    },
    "vae": {
        "block_out_channels": (32, 64, 64, 128, 128, 128), "decoder_num_layers": 6, "decoder_num_attention_heads": 8,
        "decoder_attention_head_dim": 64, "decoder_ffn_mult": 4,
    },
    "index": {"canvas_short_edge": 256, "canvas_max_pixels": 256 * 448, "reference_image_short_edge": 256},
}  # fmt: skip


def write_minimax_h3(folder: Path) -> None:
    build(folder, sizes=MINIMAX_H3)


def write_other_qwen3_omni(folder: Path) -> None:
    """Other widths, depths, experts, codebooks and rates than the benchmark's, and towers of some size."""
    write_checkpoint(folder, _other_config())


def _other_config() -> Qwen3OmniMoeConfig:
    made = bench_config().to_dict()
    thinker, talker = made["thinker_config"], made["talker_config"]
    thinker["audio_config"] |= {
        "output_dim": 768, "d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536,
        "downsample_hidden_size": 240,
    }  # fmt: skip
    thinker["vision_config"] |= {
        "out_hidden_size": 768, "hidden_size": 384, "intermediate_size": 1536, "num_heads": 6, "depth": 4,
    }  # fmt: skip
    text = thinker["text_config"]
    text |= {
        "hidden_size": 768, "intermediate_size": 1536, "moe_intermediate_size": 256, "num_hidden_layers": 6,
        "num_attention_heads": 12, "num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 4,
        "head_dim": 64, "vocab_size": 4096,
        "rope_parameters": text["rope_parameters"] | {"mrope_section": [12, 10, 10]},
    }  # fmt: skip
    talker["text_config"] |= {
        "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 512,
    }  # fmt: skip
    talker["code_predictor_config"] |= {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_code_groups": 8, "layer_types": ["full_attention"] * 4,
    }  # fmt: skip
    talker |= {"num_code_groups": 8, "thinker_hidden_size": 768, "accept_hidden_layer": 3}
    made["code2wav_config"] |= {
        "num_quantizers": 8, "hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 6,
        "num_hidden_layers": 6, "sliding_window": 48, "upsample_rates": [6, 5, 4, 2], "decoder_dim": 1024,
    }  # fmt: skip
    return Qwen3OmniMoeConfig(**made)
