"""The hibari voice, cut at the decoder's input: `front.onnx` (text to frames) and `decoder.safetensors` (fp32).

The published graph holds the decoder's matrices as int8 with one scale each; they are dequantised, because dynamic
quantisation of activations makes the output depend on how the frames are chunked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper
from onnx.utils import extract_model
from safetensors.numpy import save_file

from omnistage.models.smol_speech.convert_names import HEART_DURATIONS, HEART_FRAMES

BLOCKS = 8
_PLAIN = ("dec_in.weight", "dec_in.bias", "dec_norm.weight", "dec_norm.bias", "head.bias")
_PER_BLOCK = ("dw.weight", "dw.bias", "norm.weight", "norm.bias", "pw1.bias", "pw2.bias", "gamma")

Array = npt.NDArray[Any]


def convert(source: Path, folder: Path) -> None:
    """Writes `front.onnx`, `decoder.safetensors`, `decoder.json`.

    Inputs of the front end: `ids` int64 [1, T], `speed` float32 [1]; outputs: frames float32 [1, 130, F], pitch in Hz
    float32 [1, F], frames per phoneme float32 [T] (they sum to F). A frame is 300 samples at 24 kHz.
    """
    extract_model(
        str(source),
        str(folder / "front.onnx"),
        ["ids", "speed"],
        [HEART_FRAMES, "f0", HEART_DURATIONS],
        check_model=False,
    )
    graph = onnx.load(str(source)).graph
    save_file(decoder_tensors(graph), folder / "decoder.safetensors")
    (folder / "decoder.json").write_text(json.dumps({"blocks": BLOCKS, "norm_eps": _norm_epsilon(graph)}))


def decoder_tensors(graph: Any) -> dict[str, Array]:
    """The decoder's weights by module name; matrices [in, out]."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    names = [*_PLAIN, *(f"dec.{block}.{part}" for block in range(BLOCKS) for part in _PER_BLOCK)]
    tensors = {name: np.array(numpy_helper.to_array(weights[f"m.{name}"]), np.float32) for name in names}
    matrices = ["head", *(f"dec.{block}.{part}" for block in range(BLOCKS) for part in ("pw1", "pw2"))]
    for name in matrices:
        tensors[f"{name}.weight"] = _dequantise(weights, name)
    return tensors


def _dequantise(weights: dict[str, Any], name: str) -> Array:
    parts = {}
    for part in ("quantized", "zero_point", "scale"):
        parts[part] = numpy_helper.to_array(weights[f"/{name.replace('.pw', '/pw')}/Transpose_output_0_{part}"])
    centred = parts["quantized"].astype(np.float32) - parts["zero_point"].astype(np.float32)
    return np.ascontiguousarray(centred * parts["scale"], dtype=np.float32)


def _norm_epsilon(graph: Any) -> float:
    node = next(node for node in graph.node if node.name == "/dec_norm/LayerNormalization")
    return next((float(a.f) for a in node.attribute if a.name == "epsilon"), 1e-5)
