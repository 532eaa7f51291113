"""Whisper tiny.en from a CTranslate2 `model.bin` to a Hugging Face folder.

File format (CTranslate2 `model_spec.py`, binary versions 4 to 6), little-endian: u32 version, string spec, u32
revision, u32 count, then per variable: string name, u8 rank, u32 per dimension, u8 dtype, u32 bytes, raw data; then
aliases, which tiny.en does not need. A string is u16 length (with the final NUL) and its bytes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from omnistage.weights import WeightError

Array = npt.NDArray[Any]
_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_VERSIONS = range(4, 7)

_LAYERS = 4
_ATTENTION_HEADS = 6
_MAX_TARGET = 448
_START, _END, _PREVIOUS, _NO_TIMESTAMPS = 50257, 50256, 50360, 50362


def convert(model: Path, config: Path, tokenizer: Path, folder: Path) -> None:
    """Writes config, generation config, tokenizer and fp32 weights. Raises WeightError for another file format."""
    variables = read_variables(model)
    save_file(hf_tensors(variables), folder / "model.safetensors", {"format": "pt"})
    settings = json.loads(config.read_text(encoding="utf-8"))
    _write_json(folder / "config.json", _config(variables))
    _write_json(folder / "generation_config.json", _generation_config(settings))
    shutil.copyfile(tokenizer, folder / "tokenizer.json")


def read_variables(path: Path) -> dict[str, Array]:
    """Every variable of a CTranslate2 model file, by name."""
    with path.open("rb") as file:
        version = _integer(file, 4)
        spec = _string(file) if version in _VERSIONS else ""
        if spec != "WhisperSpec":
            raise WeightError(f"{path.name}: version {version} of {spec or 'an unknown model'} cannot be converted")
        _integer(file, 4)
        return dict(_variable(file) for _ in range(_integer(file, 4)))


def hf_tensors(variables: dict[str, Array]) -> dict[str, Array]:
    """fp32 tensors, named as in transformers' WhisperForConditionalGeneration (without the tied output projection)."""
    tensors: dict[str, Array] = {}
    for side in ("encoder", "decoder"):
        for index in range(_LAYERS):
            tensors |= _layer(variables, f"{side}/layer_{index}", f"model.{side}.layers.{index}", side == "decoder")
        tensors |= _norm(variables, f"{side}/layer_norm", f"model.{side}.layer_norm")
        positions = variables[f"{side}/position_encodings/encodings"]
        tensors[f"model.{side}.embed_positions.weight"] = _float32(positions)
    for name in ("conv1", "conv2"):
        tensors |= _linear(variables, f"encoder/{name}", f"model.encoder.{name}")
    tensors["model.decoder.embed_tokens.weight"] = _float32(variables["decoder/embeddings/weight"])
    return tensors


def _layer(variables: dict[str, Array], source: str, target: str, crosses: bool) -> dict[str, Array]:
    attention = f"{target}.self_attn"
    tensors = _stacked(variables, f"{source}/self_attention/linear_0", attention, ("q_proj", "k_proj", "v_proj"))
    tensors |= _linear(variables, f"{source}/self_attention/linear_1", f"{attention}.out_proj")
    tensors |= _norm(variables, f"{source}/self_attention/layer_norm", f"{target}.self_attn_layer_norm")
    tensors |= _linear(variables, f"{source}/ffn/linear_0", f"{target}.fc1")
    tensors |= _linear(variables, f"{source}/ffn/linear_1", f"{target}.fc2")
    tensors |= _norm(variables, f"{source}/ffn/layer_norm", f"{target}.final_layer_norm")
    if crosses:
        cross = f"{target}.encoder_attn"
        tensors |= _stacked(variables, f"{source}/attention/linear_0", cross, ("q_proj",))
        tensors |= _stacked(variables, f"{source}/attention/linear_1", cross, ("k_proj", "v_proj"))
        tensors |= _linear(variables, f"{source}/attention/linear_2", f"{cross}.out_proj")
        tensors |= _norm(variables, f"{source}/attention/layer_norm", f"{target}.encoder_attn_layer_norm")
    return tensors


def _stacked(variables: dict[str, Array], source: str, target: str, parts: tuple[str, ...]) -> dict[str, Array]:
    """Projections stored as one matrix, row block after row block. The key projection has no bias (stored as zeros)."""
    weights = np.split(_float32(variables[f"{source}/weight"]), len(parts))
    biases = np.split(_float32(variables[f"{source}/bias"]), len(parts))
    tensors: dict[str, Array] = {}
    for part, weight, bias in zip(parts, weights, biases, strict=True):
        tensors[f"{target}.{part}.weight"] = np.ascontiguousarray(weight)
        if part != "k_proj":
            tensors[f"{target}.{part}.bias"] = np.ascontiguousarray(bias)
        elif bias.any():
            raise WeightError(f"{source}: the key projection has a bias, which Whisper has not")
    return tensors


def _linear(variables: dict[str, Array], source: str, target: str) -> dict[str, Array]:
    return {f"{target}.{part}": _float32(variables[f"{source}/{part}"]) for part in ("weight", "bias")}


def _norm(variables: dict[str, Array], source: str, target: str) -> dict[str, Array]:
    names = {"weight": "gamma", "bias": "beta"}
    return {f"{target}.{part}": _float32(variables[f"{source}/{name}"]) for part, name in names.items()}


def _config(variables: dict[str, Array]) -> dict[str, Any]:
    vocabulary, width = variables["decoder/embeddings/weight"].shape
    feed_forward = variables["encoder/layer_0/ffn/linear_0/weight"].shape[0]
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", _LAYERS), ("attention_heads", _ATTENTION_HEADS), ("ffn_dim", feed_forward))
    }
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": vocabulary,
        "d_model": width,
        **sides,
        "num_mel_bins": variables["encoder/conv1/weight"].shape[1],
        "max_source_positions": variables["encoder/position_encodings/encodings"].shape[0],
        "max_target_positions": _MAX_TARGET,
        "bos_token_id": _END,
        "eos_token_id": _END,
        "pad_token_id": _END,
        "decoder_start_token_id": _START,
        "dtype": "float32",
    }


def _generation_config(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": _END,
        "eos_token_id": _END,
        "pad_token_id": _END,
        "decoder_start_token_id": _START,
        "prev_sot_token_id": _PREVIOUS,
        "no_timestamps_token_id": _NO_TIMESTAMPS,
        "max_initial_timestamp_index": 50,
        "max_length": _MAX_TARGET,
        "suppress_tokens": settings["suppress_ids"],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
        "is_multilingual": False,
    }


def _variable(file: BinaryIO) -> tuple[str, Array]:
    name = _string(file)
    shape = [_integer(file, 4) for _ in range(_integer(file, 1))]
    dtype = _DTYPES[_integer(file, 1)]
    return name, np.frombuffer(file.read(_integer(file, 4)), dtype).reshape(shape)


def _integer(file: BinaryIO, size: int) -> int:
    return int.from_bytes(file.read(size), "little")


def _string(file: BinaryIO) -> str:
    return file.read(_integer(file, 2)).rstrip(b"\0").decode()


def _float32(array: Array) -> Array:
    return np.ascontiguousarray(array, dtype=np.float32)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
