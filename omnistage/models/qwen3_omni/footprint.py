"""What the stages take of memory: each loads its own part of the checkpoint. Torch-free."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from omnistage.config.footprint import CACHED_KERNELS, Footprint, KvShape, Working
from omnistage.config.model import OmniConfig, StageConfig
from omnistage.models.qwen3_omni.tiles import TILE
from omnistage.models.weight_files import (
    TEXT_EXTRA_MB,
    TensorHeader,
    joined,
    kv_shape,
    layout_of,
    read_json,
    tensors_of,
    transformed,
    weight_bytes,
)
from omnistage.models.working_memory import Layer, ar_step, fullest, kernels, layer_of

_EMBEDDING = "thinker.model.embed_tokens.weight"
_HEAD = "thinker.lm_head.weight"
# What a first request brings into memory where no text is read: MiB, measured.
_CODE_MB = 20
_FLOAT32 = 4
# Of the vocoder's residual units.
_TAPS, _DILATIONS = 7, (1, 3, 9)
# Buffers of a tile that a vocoder's process holds: 32 to 48 measured where weights are plain, 52 to 67 in blocks.
_PLAIN_TILES, _BLOCKED_TILES = 38, 54
# One compiled kernel of a plain float32 convolution, measured.
_CONVOLUTION_BYTES = 208 << 10


def footprint(config: OmniConfig, stage: StageConfig) -> Footprint:
    """Raises WeightError for a damaged checkpoint."""
    folder = Path(config.model_path)
    tensors = [tensor for tensor in tensors_of(folder) if _is_loaded(tensor.name, stage.name)]
    # The library joins the experts of a layer into tensors of its own.
    experts = [_with_up(tensor) for tensor in tensors if ".experts." in tensor.name and ".up_proj" not in tensor.name]
    rest = [tensor for tensor in tensors if ".experts." not in tensor.name]
    chosen = layout_of(stage, weight_bytes(tensors, stage.dtype))
    head = next((tensor for tensor in rest if tensor.name == _HEAD and stage.name == "thinker"), None)
    is_linear = _is_blocked_in_code2wav if stage.name == "code2wav" else _is_linear
    parts = [
        transformed(experts, stage, "plain", lambda tensor: True, joins=True),
        transformed(rest, stage, chosen.layout, is_linear, head),
    ]
    extra = {"tokenizer, code": TEXT_EXTRA_MB << 20} if stage.name == "thinker" else {"code": _CODE_MB << 20}
    cache = int(stage.options.get("encoder_cache_mb", 0)) << 20
    layout = "int4" if stage.quantization == "int4" else chosen.layout
    told = read_json(folder / "config.json")
    return Footprint(
        weights={stage.name: joined(parts)},
        kv=_kv(told, config.variant, stage.name),
        extra=extra,
        caches={"encoded media": cache} if cache else {},
        working=fullest(_step(told, stage, tensors, layout), beside=_compiled(stage, layout)),
        dtype=stage.dtype,
        layout=layout,
        reason=chosen.reason,
    )


def _compiled(stage: StageConfig, layout: str) -> int:
    """Kernels that a process keeps; those of the vocoder's plain convolutions are compiled too."""
    is_plain = stage.name == "code2wav" and stage.device == "cpu" and stage.dtype == "float32" and layout == "plain"
    return CACHED_KERNELS * _CONVOLUTION_BYTES if is_plain else kernels(stage, layout)


def _step(config: dict[str, Any], stage: StageConfig, tensors: list[TensorHeader], layout: str) -> Working:
    if stage.name == "code2wav":
        return vocoder_step(config["code2wav_config"], stage, tensors, layout)
    told = config[f"{stage.name}_config"]
    text = told["text_config"]
    step = ar_step(layer_of(text), int(text["vocab_size"]), stage, int(text["max_position_embeddings"]))
    return step if stage.name == "talker" else fullest(step, _seeing(told, stage), _hearing(told, stage))


def _seeing(config: dict[str, Any], stage: StageConfig) -> Working:
    """The vision tower on pictures that fill a step."""
    sizes = config["vision_config"]
    heads, width = int(sizes["num_heads"]), int(sizes["hidden_size"])
    patches = stage.token_budget * int(sizes["spatial_merge_size"]) ** 2
    layer = Layer(width, heads, heads, width // heads, int(sizes["intermediate_size"]))
    pixels = 3 * int(sizes["temporal_patch_size"]) * int(sizes["patch_size"]) ** 2
    held = layer.nbytes(patches, stage.dtype) + 2 * patches * pixels * _FLOAT32
    return Working(held, f"pictures of {stage.token_budget} tokens; text alone takes less")


def _hearing(config: dict[str, Any], stage: StageConfig) -> Working:
    """The stem of the audio tower on sounds that fill a step: the first of its convolutions, which halve both sides.

    Its result is there in the order of the kernel too, and that of the next one, a quarter of it, likewise.
    """
    sizes = config["audio_config"]
    window = 2 * int(sizes["n_window"])
    windows = min(int(sizes["conv_chunksize"]), stage.token_budget // -(-window // 8) + 1)
    first = int(sizes["downsample_hidden_size"]) * int(sizes["num_mel_bins"]) // 2 * window // 2
    held = windows * first * 5 // 2 * (_FLOAT32 if stage.dtype == "float32" else _FLOAT32 // 2)
    return Working(held, f"sounds of {stage.token_budget} tokens; text alone takes less")


def vocoder_step(sizes: dict[str, Any], stage: StageConfig, tensors: list[TensorHeader], layout: str) -> Working:
    """A step of the vocoder: buffers of a tile, what streams carry, and a plain convolution's weight that is put in
    order.

    A buffer is a tile and, before the rows of each stream in it, what the widest convolution carries. Freed buffers are
    below the size from which the allocator gives them back, and what streams and kernels keep lies between them: a
    process holds some dozens of them once chunks have grown to their full length. Of every convolution of `t` taps a
    stream keeps (t - 1) * dilation inputs, of every attention layer keys and values of its window; its state before a
    step is there until the one after it is complete.
    """
    item = 4 if stage.dtype == "float32" else 2
    windows = 2 * sizes["num_hidden_layers"] * sizes["num_attention_heads"] * sizes["sliding_window"]
    windows *= sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    carried = sum(
        sum((_TAPS - 1) * dilation for dilation in _DILATIONS) * sizes["decoder_dim"] >> level
        for level in range(1, len(sizes["upsample_rates"]) + 1)
    )
    state = 2 * (windows + carried) * item
    is_plain = layout == "plain"
    ordered = max(tensor.cast(stage.dtype) for tensor in tensors if len(tensor.shape) == 3) if is_plain else 0
    before = (_TAPS - 1) * max(_DILATIONS) * sizes["decoder_dim"] // 2
    buffer = min(TILE, stage.token_budget * _widest(sizes)) + min(stage.max_num_seqs, stage.token_budget) * before
    tiles = (_PLAIN_TILES if is_plain else _BLOCKED_TILES) * buffer * item
    held = int(tiles + stage.max_num_seqs * state + ordered)
    return Working(held, f"tiles, {stage.max_num_seqs} streams", int(state))


def _widest(sizes: dict[str, Any]) -> int:
    """Elements of a frame where they are most."""
    rates = [int(rate) for rate in sizes["upsample_rates"]]
    first = int(math.prod(sizes["upsampling_ratios"])) * int(sizes["decoder_dim"])
    return max(first * math.prod(rates[:level]) >> level for level in range(1, len(rates) + 1))


def _is_loaded(name: str, stage: str) -> bool:
    return name.startswith(f"{stage}.") or (stage == "talker" and name == _EMBEDDING)


def _with_up(tensor: TensorHeader) -> TensorHeader:
    """A gate of an expert together with the matrix of its size that the library puts below it."""
    rows, columns = tensor.shape
    return tensor._replace(shape=(2 * rows, columns)) if ".gate_proj" in tensor.name else tensor


def _is_linear(tensor: TensorHeader) -> bool:
    """Of the thinker's language model and the talker; routers are no linear layers of the library."""
    name = tensor.name
    inside = name.startswith(("thinker.model.", "talker.")) or name == _HEAD
    plain = "embed" not in name and not name.endswith("mlp.gate.weight")
    return inside and plain and name.endswith(".weight") and len(tensor.shape) == 2


def _is_blocked_in_code2wav(tensor: TensorHeader) -> bool:
    """Linear layers, and convolutions but the depthwise and pointwise ones and those with one output."""
    shape = tensor.shape
    if not tensor.name.endswith(".weight") or "embed" in tensor.name or "codebook" in tensor.name:
        return False
    return len(shape) == 2 or (len(shape) == 3 and shape[1] > 1 and shape[2] > 1 and shape[0] > 1)


def _kv(config: dict[str, Any], variant: str, stage: str) -> KvShape | None:
    if stage == "code2wav":
        return None
    text = config[f"{stage}_config"]["text_config"]
    speaks = stage == "thinker" and variant == "default"
    return kv_shape(text, text["hidden_size"] if speaks else 0)
