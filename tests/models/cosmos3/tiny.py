"""Tiny random Cosmos3 checkpoints and the reference library's answers on them.

Sizes are unlike the published ones wherever they can be, so that a constant in the code shows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import CosmosActionCondition
from diffusers.modular_pipelines import ModularPipeline
from PIL import Image

from omnistage.payload import Array

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CHANNELS = 6
_PARTS = ("transformer", "vae", "scheduler", "text_tokenizer", "sound_tokenizer")


@dataclass
class Tiny:
    """A checkpoint on disk and the very modules that it was written from."""

    folder: Path
    parts: dict[str, Any]
    config: dict[str, Any]


def seeded(model: Any, seed: int) -> Any:
    """Fills every parameter: library defaults leave gates and scales at 0 or 1, which hides mistakes."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=draw)
            is_scale = name.endswith(("weight_g", "gamma")) or ("norm" in name and parameter.ndim == 1)
            is_small = parameter.ndim < 2 or name.endswith(("alpha", "beta"))
            width = 0.1 if is_small else max(1, math.prod(parameter.shape[1:])) ** -0.5
            parameter.copy_(1 + 0.1 * noise if is_scale else noise * width)
            if "action_proj" in name and name.endswith("fc.weight"):
                parameter.copy_(noise / 4)
            if name == "decoder.conv2.weight_g":
                parameter.mul_(0.05)  # keeps the sound within -1..1
    return model.eval().requires_grad_(False)


def make_tokenizer() -> Any:
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in visible}
    hidden = [byte for byte in range(256) if byte not in shown]
    shown |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    vocab = {shown[byte]: byte for byte in range(256)}
    tokenizer = transformers.Qwen2TokenizerFast(
        vocab=vocab, merges=[], unk_token=_SPECIAL[0], eos_token=_SPECIAL[2], pad_token=_SPECIAL[0]
    )
    tokenizer.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in _SPECIAL], True)
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _transformer(vocab: int, seed: int, **changes: Any) -> Any:
    sizes = {
        "head_dim": 12,
        "hidden_size": 20,
        "intermediate_size": 28,
        "latent_channel": _CHANNELS,
        "patch_latent_dim": 4 * _CHANNELS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": vocab,
        "rope_scaling": {"mrope_section": [2, 2, 2], "rope_type": "default"},
        "base_fps": 20,
        "unified_3d_mrope_temporal_modality_margin": 900,
    }
    return seeded(diffusers.Cosmos3OmniTransformer(**(sizes | changes)), seed)


def _vae(seed: int) -> Any:
    draw = np.random.default_rng(seed)
    vae = diffusers.AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=_CHANNELS,
        dim_mult=[1, 1, 2, 2],
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
        temperal_downsample=[False, True, True],
        latents_mean=draw.normal(0, 0.3, _CHANNELS).round(3).tolist(),
        latents_std=draw.uniform(0.6, 1.4, _CHANNELS).round(3).tolist(),
    )
    return seeded(vae, seed)


def _sound(seed: int) -> Any:
    sound = diffusers.Cosmos3AVAEAudioTokenizer(
        sampling_rate=6000,
        vocoder_input_dim=5,
        dec_dim=4,
        dec_c_mults=(1, 2, 2),
        dec_strides=(2, 4, 5),
        dec_out_channels=2,
        hop_size=40,
        enc_dim=4,
        enc_num_blocks=1,
        enc_n_fft=64,
        enc_hop_length=16,
        enc_latent_dim=10,
        enc_c_mults=(1, 2),
        enc_strides=(2, 4),
        bottleneck={"type": "vae"},
    )
    return seeded(sound, seed)


def make(kind: str, folder: Path, seed: int = 5150, **sizes: Any) -> Tiny:
    """`kind`: "base", "edge" (relu2 backbone, native flow schedule) or "distilled". `sizes`: of a base transformer."""
    tokenizer = make_tokenizer()
    parts: dict[str, Any] = {"text_tokenizer": tokenizer, "vae": _vae(seed + 1)}
    heads = {"action_gen": True, "action_dim": 11, "num_embodiment_domains": 32}
    config: dict[str, Any] = {"enable_safety_checker": False, "default_use_system_prompt": True}
    if kind == "base":
        sound = {"sound_gen": True, "sound_dim": 5, "sound_latent_fps": 150.0}
        parts["transformer"] = _transformer(len(tokenizer), seed + 2, **heads, **sound, **sizes)
        parts["sound_tokenizer"] = _sound(seed + 3)
        parts["scheduler"] = diffusers.UniPCMultistepScheduler(
            use_karras_sigmas=True, use_flow_sigmas=True, prediction_type="flow_prediction", sigma_max=200.0,
            sigma_min=0.147,
        )  # fmt: skip
    elif kind == "edge":
        parts["transformer"] = _transformer(
            len(tokenizer), seed + 4, **heads, hidden_act="relu2", qk_norm_for_text=False, use_und_k_norm_for_gen=True
        )
        parts["scheduler"] = diffusers.UniPCMultistepScheduler(
            use_flow_sigmas=True, flow_shift=5.0, prediction_type="flow_prediction"
        )
        config |= {"default_use_system_prompt": False, "use_native_flow_schedule": True}
    else:
        parts["transformer"] = _transformer(len(tokenizer), seed + 5)
        parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0, stochastic_sampling=True)
        config |= {"is_distilled": True, "distilled_sigmas": [0.999, 0.85, 0.6]}
    _save(kind, folder, parts, config)
    return Tiny(folder, parts, config)


def _save(kind: str, folder: Path, parts: dict[str, Any], config: dict[str, Any]) -> None:
    folder.mkdir()
    for name, part in parts.items():
        part.save_pretrained(str(folder / name))
    modular = "Distilled" if kind == "distilled" else "Omni"
    index: dict[str, Any] = {
        "_class_name": f"Cosmos3{modular}ModularPipeline",
        "_blocks_class_name": f"Cosmos3{modular}Blocks",
        "_diffusers_version": diffusers.__version__,
        **config,
    }
    for name, part in parts.items():
        library = "transformers" if name == "text_tokenizer" else "diffusers"
        hint = [library, "Qwen2Tokenizer" if name == "text_tokenizer" else type(part).__name__]
        where = {"pretrained_model_name_or_path": str(folder), "subfolder": name, "variant": None, "revision": None}
        index[name] = [*hint, {"type_hint": hint, **where}]
    (folder / "modular_model_index.json").write_text(json.dumps(index))
    if kind != "distilled":
        task = {"_class_name": "Cosmos3OmniPipeline", **config}
        (folder / "model_index.json").write_text(json.dumps(task))


@dataclass
class Reference:
    """What the library gives. `latents` in model layout (normalised), `pixels` uint8 [T, H, W, 3]."""

    latents: Array
    pixels: Array
    sound: Array | None
    action: Array | None


def reference(tiny: Tiny, ask: dict[str, Any]) -> Reference:
    """Runs the library's pipeline: the modular one for control videos and distilled checkpoints, else the task one.

    `ask` has the request's parameters with arrays in place of media, and `seed`, `flow_shift`, `use_karras_sigmas`.
    """
    given = dict(ask)
    generator = torch.Generator().manual_seed(given.pop("seed"))
    overrides = {k: given.pop(k) for k in ("flow_shift", "use_karras_sigmas") if k in given}
    scheduler = type(tiny.parts["scheduler"]).from_config(tiny.parts["scheduler"].config, **overrides)
    given = {key: _for_library(key, value) for key, value in given.items()}
    parts = tiny.parts | {"scheduler": scheduler}
    vae = parts["vae"]
    decoded: list[torch.Tensor] = []
    decode = vae.decode

    def spy(z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        decoded.append(z.clone())
        return decode(z, *args, **kwargs)

    vae.decode = spy
    try:
        video, sound, action = _run(tiny, parts, given, generator)
    finally:
        vae.decode = decode
    raw = torch.cat(decoded, 2).numpy()
    shape = (1, -1, 1, 1, 1)
    mean, std = (np.array(value).reshape(shape) for value in (vae.config.latents_mean, vae.config.latents_std))
    return Reference(
        latents=(raw - mean) / std,
        pixels=(video.float().numpy() * 255).round().astype(np.uint8).transpose(0, 2, 3, 1),
        sound=None if sound is None else sound.numpy(),
        action=None if action is None else action[0].numpy(),
    )


def _run(tiny: Tiny, parts: dict[str, Any], given: dict[str, Any], generator: torch.Generator) -> tuple[Any, Any, Any]:
    if "control_videos" in given or tiny.config.get("is_distilled"):
        pipe = ModularPipeline.from_pretrained(str(tiny.folder))
        pipe.update_components(**parts)
        pipe.set_progress_bar_config(disable=True)
        made = pipe(generator=generator, output_type="pt", output=["videos", "sound", "action"], **given)
        return made["videos"], made["sound"], made["action"]
    pipe = diffusers.Cosmos3OmniPipeline(**parts, **tiny.config)
    pipe.set_progress_bar_config(disable=True)
    made = pipe(generator=generator, output_type="pt", **given)
    return made.video, made.sound, made.action


def _for_library(key: str, value: Any) -> Any:
    if key == "image":
        return Image.fromarray(value)
    if key == "video":
        return [Image.fromarray(frame) for frame in value]
    if key == "control_videos":
        return {hint: _for_library("video", frames) for hint, frames in value.items()}
    if key == "action":
        fields = {name: _for_library(name, field) for name, field in value.items()}
        return CosmosActionCondition(**fields)
    return torch.from_numpy(value) if key == "raw_actions" or key.endswith("latents") else value


def picture(width: int, height: int, seed: int = 0) -> Array:
    """uint8 [H, W, 3] with gradients and noise."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    base = np.stack([x * 200 / width, y * 200 / height, (x + y) * 150 / (width + height)], -1)
    return (base + draw.uniform(0, 55, base.shape)).astype(np.uint8)


def clip(width: int, height: int, frames: int, seed: int = 0) -> Array:
    """uint8 [T, H, W, 3]."""
    return np.stack([picture(width, height, seed + index) for index in range(frames)])
