"""A tiny MiniMax-H3 checkpoint with random weights, laid out like the published one, and media to condition on.

Sizes differ from the published ones wherever they can, so that a constant in the code under test shows.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from transformers import AddedToken, Qwen2TokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

CHANNELS, AUDIO_CHANNELS, RATE, HOP = 6, 4, 8000, 200
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
            "<|video_pad|>")  # fmt: skip
CLASSES = {
    "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
    "tokenizer": ("transformers", "Qwen2TokenizerFast"),
    "processor": ("transformers", "Qwen3VLProcessor"),
    "vae": ("diffusers", "AutoencoderKLMiniMaxH3"),
    "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio"),
    "scheduler": ("diffusers", "MiniMaxH3Scheduler"),
    "audio_scheduler": ("diffusers", "MiniMaxH3Scheduler"),
    "transformer": ("diffusers", "MiniMaxH3Transformer3DModel"),
    "transformer_ref": ("diffusers", "MiniMaxH3Transformer3DModel"),
}
# canvas short edge 32 px, area 32 x 64 px, reference pictures with a short edge of 64 px
GEOMETRY = {"canvas_short_edge": 32, "canvas_max_pixels": 2048, "reference_image_short_edge": 64}


def filled(model: Any, seed: int) -> Any:
    """Every parameter drawn anew: the library leaves several at 0 or 1, which would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(_value(name, torch.randn(parameter.shape, generator=generator)))
    return model.eval()


def _value(name: str, noise: torch.Tensor) -> torch.Tensor:
    leaf = name.rsplit(".", 1)[-1]
    if leaf in ("weight_g", "scale1", "scale2"):
        return 0.7 + 0.1 * torch.tanh(noise)
    if "norm" in name and leaf == "weight" and noise.ndim == 1:
        return 1.0 + 0.1 * noise
    if any(part in name for part in ("embed_tokens", "register_tokens", "pos_embed")):
        return 0.5 * noise
    if noise.ndim >= 2 and leaf not in ("alpha", "beta"):
        return noise / math.sqrt(max(1, math.prod(noise.shape[1:])))
    return 0.1 * noise


def tokenizer() -> Any:
    """Byte-level, one token per byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) if b in plain else None for b in range(256)]
    spare = iter(range(256, 512))
    vocabulary = {letter or chr(next(spare)): number for number, letter in enumerate(letters)}
    made = Qwen2TokenizerFast(vocab=vocabulary, merges=[], unk_token=SPECIALS[0], eos_token=SPECIALS[2],
                              pad_token=SPECIALS[0])  # fmt: skip
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS], special_tokens=True)
    return made


def text_encoder(tokens: Any, seed: int, layers: int = 51) -> Any:
    ids = tokens.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokens), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1],
                            "mrope_interleaved": True},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"), vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"), tie_word_embeddings=False,
    )  # fmt: skip
    return filled(Qwen3VLForConditionalGeneration(config), seed)


def transformer(seed: int, **sizes: Any) -> Any:
    own: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 16, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1,
        "ffn_dim": 32, "in_channels": CHANNELS, "audio_in_channels": AUDIO_CHANNELS, "text_dim": 32, "freq_dim": 32,
        "time_embed_hidden_dim": 32, "time_embed_dim": 16, "rope_freq_dim": 2,
    }  # fmt: skip
    return filled(MiniMaxH3Transformer3DModel(**own | sizes), seed)


def video_vae(seed: int, **sizes: Any) -> Any:
    draw = np.random.default_rng(seed)
    own: dict[str, Any] = {
        "latent_channels": CHANNELS, "block_out_channels": (8,) * 6, "layers_per_block": 1, "norm_num_groups": 4,
        "decoder_num_layers": 2, "decoder_num_attention_heads": 2, "decoder_attention_head_dim": 8,
        "decoder_num_register_tokens": 2, "decoder_ffn_mult": 2, "latents_mean": draw.normal(0, 0.3, CHANNELS).tolist(),
        "latents_std": draw.uniform(0.6, 1.4, CHANNELS).tolist(),
    }  # fmt: skip
    return filled(AutoencoderKLMiniMaxH3(**own | sizes), seed)


def audio_vae(seed: int) -> Any:
    draw = np.random.default_rng(seed)
    return filled(
        AutoencoderKLMiniMaxH3Audio(
            encoder_dim=2, encoder_rates=(2, 4, 5, 5), latent_dim=16, latent_channels=AUDIO_CHANNELS,
            num_attention_heads=2, decoder_dim=32, decoder_rates=(5, 5, 4, 2), decoder_kernel_sizes=(9, 9, 8, 4),
            resblock_kernel_sizes=(3,), resblock_dilation_sizes=((1, 3),), sampling_rate=RATE,
            latents_mean=draw.normal(0, 0.2, AUDIO_CHANNELS).tolist(),
            latents_std=draw.uniform(0.7, 1.3, AUDIO_CHANNELS).tolist(),
        ),
        seed,
    )  # fmt: skip


def build(folder: Path, seed: int = 7, sizes: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Writes the checkpoint to `folder`; returns its modules by component name. `sizes` of "transformer", "vae" and
    "index" replace the tiny ones."""
    sizes = sizes or {}
    other = sizes.get("transformer", {})
    tokens = tokenizer()
    modules = {
        "tokenizer": tokens,
        "text_encoder": text_encoder(tokens, seed),
        "transformer": transformer(seed + 1, **other),
        "transformer_ref": transformer(seed + 2, **other),
        "vae": video_vae(seed + 3, **sizes.get("vae", {})),
        "audio_vae": audio_vae(seed + 4),
        "scheduler": MiniMaxH3Scheduler(shift=12.0),
        "audio_scheduler": MiniMaxH3Scheduler(shift=3.0),
    }
    for name, module in modules.items():
        module.save_pretrained(str(folder / name))
    _write_processor(folder / "processor")
    index: dict[str, Any] = {"_class_name": "MiniMaxH3ModularPipeline", "_blocks_class_name": "MiniMaxH3Blocks"}
    for name, (library, kind) in CLASSES.items():
        entry = {"type_hint": [library, kind], "pretrained_model_name_or_path": "MiniMaxAI/MiniMax-H3"}
        index[name] = [library, kind, entry | {"subfolder": name, "variant": None, "revision": None}]
    (folder / "modular_model_index.json").write_text(json.dumps(index | GEOMETRY | sizes.get("index", {})))
    return modules


def image_processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": 1024, "longest_edge": 1 << 24},
    )  # fmt: skip


def _write_processor(folder: Path) -> None:
    image_processor().save_pretrained(str(folder))
    file = folder / "preprocessor_config.json"
    names = {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    clips = {
        "size": {"longest_edge": 25165824, "shortest_edge": 4096}, "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "video_preprocessor_config.json").write_text(json.dumps(clips))


def picture(seed: int, height: int, width: int) -> np.ndarray:
    """uint8 [height, width, 3]: a slope with noise."""
    y, x = np.mgrid[0:height, 0:width]
    slope = np.stack([x * 255 / width, y * 255 / height, (x + y) * 255 / (width + height)], -1) * 0.7
    noise = np.random.default_rng(seed).uniform(0, 60, (height, width, 3))
    return (slope + noise).clip(0, 255).astype(np.uint8)


def clip(seed: int, frames: int, height: int = 32, width: int = 64) -> np.ndarray:
    """uint8 [frames, height, width, 3] that brightens."""
    noise = np.random.default_rng(seed).uniform(0, 100, (frames, height, width, 3))
    return (noise + np.linspace(0, 150, frames)[:, None, None, None]).astype(np.uint8)


def sound(seed: int, seconds: float, channels: int, rate: int = RATE) -> np.ndarray:
    """float32 [channels, samples]: tones with noise."""
    t = np.arange(int(rate * seconds)) / rate
    tones = np.stack([0.5 * np.sin(2 * np.pi * (220 + 110 * channel) * t) for channel in range(channels)])
    return (tones + np.random.default_rng(seed).normal(0, 0.02, tones.shape)).astype(np.float32)
