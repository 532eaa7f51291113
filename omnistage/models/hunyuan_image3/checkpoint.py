"""What a HunyuanImage-3.0 folder says about itself. Torch-free: reads the JSON files only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omnistage.errors import ConfigError

Template = Literal["pretrain", "instruct"]

# Keys that change the network; any other value than these is another model.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "norm_type": ("rms",),
    "use_qk_norm": (True,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_mla": (False,),
    "use_cla": (False,),
    "use_mixed_mlp_moe": (True,),
    "moe_layer_num_skipped": (0,),
    "norm_topk_prob": (True,),
    "routed_scaling_factor": (False, 1, 1.0),
    "n_group": (False, None, 1),
    "topk_group": (False, None, 1),
    "tie_word_embeddings": (False,),
    "patch_size": (1,),
    "img_proj_type": ("unet",),
    "cond_image_type": ("vae_vit",),
    "cond_token_attn_type": ("joint_full",),
}


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What `generation_config.json` says. `sampling` holds sampling parameters by the names that stages use;
    `max_length` bounds prompt and generated tokens together (0: not given)."""

    template: Template
    steps: int
    guidance: float
    flow_shift: float
    bot_task: str
    drop_think: bool
    system_prompt: str
    max_length: int
    eos: frozenset[int]
    sampling: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Sizes and switches. `spatial` / `temporal`: pixels and frames per latent; `vit_tokens`: tokens that the vision
    part of every reference picture takes; `distilled`: the guidance is a token; `meanflow`: so is the next timestep."""

    folder: Path
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    expert_width: int
    top_k: tuple[int, ...]
    eps: float
    theta: float
    vocab: int
    max_positions: int
    base_size: int
    latent_channels: int
    patch_hidden: int
    spatial: int
    temporal: int
    scaling: float
    vit_tokens: int
    vit_patch: int
    vae: dict[str, Any]
    vit: dict[str, Any]
    vit_processor: dict[str, Any]
    distilled: bool
    meanflow: bool
    defaults: Defaults

    @property
    def max_tokens(self) -> int:
        """The longest sequence, generated tokens included."""
        return min(self.max_positions, self.defaults.max_length or self.max_positions)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Raises ConfigError naming the file or key that is missing or of an unknown kind."""
    config = _read(folder / "config.json")
    for key, allowed in _FIXED.items():
        if key in config and config[key] not in allowed:
            raise ConfigError(f"hunyuan_image3: config.json: {key} {config[key]!r} is not supported", param="model")
    vae, vit = _section(config, "vae"), _section(config, "vit")
    processor = _section(config, "vit_processor")
    layers = int(_need(config, "num_hidden_layers"))
    head_dim = (
        config.get("attention_head_dim")
        or config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"]
    )
    if set(_per_layer(config, "num_shared_expert", layers)) != {1}:
        raise ConfigError("hunyuan_image3: config.json: num_shared_expert other than 1 is not supported", param="model")
    widths = set(_per_layer(config, "moe_intermediate_size", layers))
    if len(widths) != 1:
        raise ConfigError("hunyuan_image3: config.json: moe_intermediate_size differs by layer", param="model")
    return Checkpoint(
        folder=folder,
        hidden=int(_need(config, "hidden_size")),
        layers=layers,
        heads=int(_need(config, "num_attention_heads")),
        kv_heads=int(_need(config, "num_key_value_heads")),
        head_dim=int(head_dim),
        experts=int(_need(config, "num_experts")),
        expert_width=widths.pop(),
        top_k=tuple(_per_layer(config, "moe_topk", layers)),
        eps=float(config.get("rms_norm_eps", 1e-5)),
        theta=float(config.get("rope_theta", 10000.0)),
        vocab=int(_need(config, "vocab_size")),
        max_positions=int(_need(config, "max_position_embeddings")),
        base_size=int(config.get("image_base_size", 1024)),
        latent_channels=int(_need(vae, "latent_channels")),
        patch_hidden=int(config.get("patch_embed_hidden_dim", 1024)),
        spatial=int(_need(vae, "ffactor_spatial")),
        temporal=int(_need(vae, "ffactor_temporal")),
        scaling=float(_need(vae, "scaling_factor")),
        vit_tokens=int(processor.get("max_num_patches", 1024)),
        vit_patch=int(processor.get("patch_size", vit.get("patch_size", 16))),
        vae=vae,
        vit=vit,
        vit_processor=processor,
        distilled=bool(config.get("cfg_distilled", False)),
        meanflow=bool(config.get("use_meanflow", False)),
        defaults=_defaults(folder, config),
    )


def _defaults(folder: Path, config: dict[str, Any]) -> Defaults:
    given = _read(folder / "generation_config.json")
    template = given.get("sequence_template", "pretrain")
    if template not in ("pretrain", "instruct"):
        raise ConfigError(f"hunyuan_image3: generation_config.json: unknown sequence_template {template!r}")
    eos = given.get("eos_token_id", config.get("eos_token_id"))
    sampling: dict[str, Any] = {"temperature": 0.0}
    if given.get("do_sample", True):
        names = ("temperature", "top_k", "top_p", "repetition_penalty")
        sampling = {name: given[name] for name in names if given.get(name) is not None}
    return Defaults(
        template=template,
        steps=int(given.get("diff_infer_steps", 50)),
        guidance=float(given.get("diff_guidance_scale", 5.0)),
        flow_shift=float(given.get("flow_shift", 3.0)),
        bot_task=str(given.get("bot_task", "image")),
        drop_think=bool(given.get("drop_think", False)),
        system_prompt=str(given.get("use_system_prompt") or "None"),
        max_length=int(given.get("max_length") or 0),
        eos=frozenset([eos] if isinstance(eos, int) else eos or ()),
        sampling=sampling,
    )


def _per_layer(config: dict[str, Any], key: str, layers: int) -> list[int]:
    """The value of each layer; the file holds one for all or a list."""
    value = config.get(key, 1)
    if isinstance(value, int):
        return [value] * layers
    if not isinstance(value, list) or len(value) < layers:
        raise ConfigError(f"hunyuan_image3: config.json: {key} is neither a number nor one per layer", param="model")
    return [int(item) for item in value[:layers]]


def _section(config: dict[str, Any], key: str) -> dict[str, Any]:
    section = _need(config, key)
    if not isinstance(section, dict):
        raise ConfigError(f"hunyuan_image3: config.json: {key} is no object", param="model")
    return section


def _need(config: dict[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ConfigError(f"hunyuan_image3: config.json lacks {key}", param="model")
    return config[key]


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"hunyuan_image3: cannot read {file.name}: {error.strerror}", param="model") from None
    except ValueError as error:
        raise ConfigError(f"hunyuan_image3: {file.name} is no valid JSON: {error}", param="model") from None
    if not isinstance(content, dict):
        raise ConfigError(f"hunyuan_image3: {file.name} is no JSON object", param="model")
    return content
