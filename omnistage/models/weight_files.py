"""What weight files hold, from their headers alone, and what becomes of it in memory. Torch-free."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from omnistage.config.footprint import Footprint, KvShape, Weights
from omnistage.config.model import StageConfig
from omnistage.models.working_memory import ar_step, fullest, kernels, layer_of
from omnistage.ops.layout_rule import LayoutName, automatic_layout, physical_memory
from omnistage.weights import WeightError

ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
_FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_MAX_HEADER_BYTES = 100 << 20
# Bytes per weight of a packed layer: 4 bits, and per group of 32 a scale and a zero point of two bytes each.
_INT4_BYTES, _GROUP, _ROW_MULTIPLE = 0.625, 32, 16
# Tokenizer, code and tables that come into memory with the first request: MiB, measured.
TEXT_EXTRA_MB = 45


class TensorHeader(NamedTuple):
    """One tensor of a file; `dtype` as safetensors writes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stored(self) -> int:
        """Bytes in the file."""
        return self.elements * ITEM_BYTES.get(self.dtype, 1)

    def cast(self, dtype: str) -> int:
        """Bytes as `dtype` ("float32", ...); integers stay what they are."""
        return self.elements * ITEM_BYTES[_FLOATS[dtype]] if self.is_float else self.stored

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("F", "BF"))


def tensors_of(place: Path) -> list[TensorHeader]:
    """The tensors of a safetensors file, or of all in a folder (those that its index names, if it has one).

    Raises WeightError when there is none, or one is missing or damaged.
    """
    if place.is_file():
        return _header(place)
    indexes = sorted(place.glob("*.safetensors.index.json"))
    names = {name for index in indexes for name in json.loads(index.read_text("utf-8"))["weight_map"].values()}
    files = [place / name for name in sorted(names)] or sorted(place.glob("*.safetensors"))
    if not files:
        raise WeightError(f"{place.name}: the folder has no .safetensors file")
    return [tensor for file in files for tensor in _header(file)]


def _header(file: Path) -> list[TensorHeader]:
    try:
        with file.open("rb") as content:
            (length,) = struct.unpack("<Q", content.read(8).ljust(8, b"\xff"))
            entries = json.loads(content.read(length) if length <= _MAX_HEADER_BYTES else b"")
        return [
            TensorHeader(name, entry["dtype"], tuple(entry["shape"]))
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except OSError as error:
        raise WeightError(f"{file.name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WeightError(f"{file.name} is no readable safetensors file; fetch it again") from None


def read_json(file: Path) -> dict[str, Any]:
    """Raises WeightError for what is no JSON object."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise WeightError(f"{file.name} of the model folder cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise WeightError(f"{file.name} of the model folder is no JSON object")
    return content


def loaded(tensors: Iterable[TensorHeader], dtype: str) -> Weights:
    """Tensors that a module computes with as `dtype`: a mapped file serves where that is how it holds them."""
    tensors = list(tensors)
    copied = sum(tensor.cast(dtype) for tensor in tensors if not _as_stored(tensor, dtype))
    mapped = sum(tensor.stored for tensor in tensors if _as_stored(tensor, dtype))
    return Weights(mapped + copied, sum(tensor.stored for tensor in tensors) + copied, maps=mapped > 0)


def copied(tensors: Iterable[TensorHeader], dtype: str) -> Weights:
    """Tensors that are written into a module's own memory."""
    tensors = list(tensors)
    held = sum(tensor.cast(dtype) for tensor in tensors)
    return Weights(held, held + sum(tensor.stored for tensor in tensors))


def _as_stored(tensor: TensorHeader, dtype: str) -> bool:
    return tensor.dtype == _FLOATS[dtype] or not tensor.is_float


def joined(parts: Iterable[Weights]) -> Weights:
    """Parts that are loaded one after the other from files that stay mapped."""
    parts = list(parts)
    maps = any(part.maps for part in parts)
    passing = sum(part.passing for part in parts)
    return Weights(sum(part.held for part in parts), sum(part.peak for part in parts), maps, passing)


class Chosen(NamedTuple):
    """How the linear layers of a component are held, and why."""

    layout: LayoutName
    reason: str


def layout_of(stage: StageConfig, weight_bytes: int) -> Chosen:
    """`weight_layout` of a stage whose component has `weight_bytes` of weights in its dtype."""
    if stage.weight_layout != "auto":
        return Chosen(stage.weight_layout, "requested")
    if stage.dtype != "float32" or stage.device != "cpu":
        return Chosen("plain", f"blocks are for float32 on a CPU, not for {stage.dtype} on {stage.device}")
    total = physical_memory()
    told = f"weights of {weight_bytes >> 20} MiB against a sixteenth of {total >> 20} MiB of memory"
    return Chosen(automatic_layout(weight_bytes, total), told)


def transformed(
    tensors: Iterable[TensorHeader],
    stage: StageConfig,
    layout: LayoutName,
    is_linear: Callable[[TensorHeader], bool],
    head: TensorHeader | None = None,
    *,
    joins: bool = False,
) -> Weights:
    """Tensors loaded as the stage's dtype whose linear layers are then packed (int4), or laid out as `layout` says.

    Convolutions among them are held in blocks only. With `joins` the library makes larger tensors of them; those that
    it casts first wait for each other, half of them at the fullest point (measured).
    `head` is the output head: of its own if it is among the tensors, else an embedding's weight that is used twice.
    """
    tensors = list(tensors)
    base = copied(tensors, stage.dtype) if joins else loaded(tensors, stage.dtype)
    linears = [tensor for tensor in tensors if is_linear(tensor) and tensor is not head]
    made = sum(_made(tensor, stage, layout) for tensor in linears)
    dropped = sum(tensor.cast(stage.dtype) for tensor in linears if _is_replaced(tensor, stage, layout))
    if head is not None:
        made += _made_head(head, stage, layout)
        if is_linear(head) and (stage.quantization == "int4" or layout == "blocked"):
            dropped += head.cast(stage.dtype)
    waiting = sum(tensor.cast(stage.dtype) for tensor in tensors if joins and not _as_stored(tensor, stage.dtype)) // 2
    # What is dropped of a mapped file leaves its pages there.
    passing = waiting + (dropped if joins else 0)
    return Weights(base.held + made - dropped, base.peak + made + waiting, base.maps, passing)


def weight_bytes(tensors: Iterable[TensorHeader], dtype: str) -> int:
    """As `dtype`."""
    return sum(tensor.cast(dtype) for tensor in tensors)


def _made(tensor: TensorHeader, stage: StageConfig, layout: LayoutName) -> int:
    """Bytes made of a linear layer's weight beside it."""
    if stage.quantization == "int4":
        return int(tensor.elements * _INT4_BYTES) if _fits(tensor) else 0
    return tensor.cast(stage.dtype) if layout in ("blocked", "both") else 0


def _made_head(head: TensorHeader, stage: StageConfig, layout: LayoutName) -> int:
    if stage.quantization == "int4":
        return head.elements + 2 * head.shape[0]
    return _made(head, stage, layout)


def _is_replaced(tensor: TensorHeader, stage: StageConfig, layout: LayoutName) -> bool:
    if stage.quantization == "int4":
        return _fits(tensor)
    return layout == "blocked" or (layout == "both" and len(tensor.shape) == 3)


def _fits(tensor: TensorHeader) -> bool:
    return tensor.shape[1] % _GROUP == 0 and tensor.shape[0] % _ROW_MULTIPLE == 0


def kv_shape(config: dict[str, Any], handoff_width: int = 0) -> KvShape:
    """From the configuration of a transformers text model."""
    heads = int(config["num_attention_heads"])
    return KvShape(
        layers=int(config["num_hidden_layers"]),
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        max_model_len=int(config["max_position_embeddings"]),
        handoff_width=handoff_width,
    )


def is_linear_weight(tensor: TensorHeader) -> bool:
    """By the names of transformers' text models."""
    return tensor.name.endswith(".weight") and len(tensor.shape) == 2 and "embed" not in tensor.name


def text_footprint(folder: Path, stage: StageConfig, *, keeps_hidden: bool = False) -> Footprint:
    """A causal text model run by the torch backend. With `keeps_hidden` a row is kept beside every position."""
    config = read_json(folder / "config.json")
    return text_model(tensors_of(folder), config, stage, config["hidden_size"] if keeps_hidden else 0)


def text_model(
    tensors: list[TensorHeader], config: dict[str, Any], stage: StageConfig, handoff_width: int = 0
) -> Footprint:
    """See `text_footprint`; for tensors by transformers' names."""
    heads = [tensor for tensor in tensors if tensor.name == "lm_head.weight"]
    embeddings = [tensor for tensor in tensors if tensor.name.endswith("embed_tokens.weight")]
    tied = bool(config.get("tie_word_embeddings")) or not heads
    kept = [tensor for tensor in tensors if not (tied and tensor.name == "lm_head.weight")]
    head = next(iter(embeddings if tied else heads), None)
    chosen = layout_of(stage, weight_bytes(kept, stage.dtype))
    weights = transformed(kept, stage, chosen.layout, is_linear_weight, head)
    layout = "int4" if stage.quantization == "int4" else chosen.layout
    kv = kv_shape(config, handoff_width)
    step = ar_step(layer_of(config), head.shape[0] if head is not None else 0, stage, kv.max_model_len)
    return Footprint(
        weights={"model": weights},
        kv=kv,
        extra={"tokenizer, code": TEXT_EXTRA_MB << 20},
        working=fullest(step, beside=kernels(stage, layout)),
        dtype=stage.dtype,
        layout=layout,
        reason=chosen.reason,
    )
