"""The Piper voice "joe" (VITS), cut in three: `encoder.onnx`, `flow.onnx` and the HiFi-GAN in `decoder.safetensors`.

The published graph draws its two noises inside; here both come from outside, so that a request's seed decides them:
the duration predictor's is an input of the encoder, the prior's is added between encoder and flow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.utils import extract_model
from safetensors.numpy import save_file

from omnistage.models.smol_speech.convert_names import (
    DURATION_NOISE,
    FRAME_MASK,
    LATENT,
    PRIOR_DEVIATION,
    PRIOR_MEAN,
    PRIOR_SAMPLE,
)


def convert(model: Path, config: Path, folder: Path) -> None:
    """Writes the parts and `voice.json` (sample rate in Hz, scales, phoneme ids).

    Encoder: `input` int64 [1, T], `input_lengths` int64 [1], `scales` float32 [3] (noise, length, duration noise),
    duration noise float32 [1, 2, T]; gives mean and deviation of the prior [1, 192, F] and the frame mask [1, 1, F].
    Flow: sample of the prior and mask; gives the latent [1, 192, F]. A frame is 256 samples at 22050 Hz.
    """
    graph_file = folder / "graph.onnx"
    _expose_duration_noise(model, graph_file)
    inputs = ["input", "input_lengths", "scales", DURATION_NOISE]
    _extract(graph_file, folder / "encoder.onnx", inputs, [PRIOR_MEAN, PRIOR_DEVIATION, FRAME_MASK])
    _extract(graph_file, folder / "flow.onnx", [PRIOR_SAMPLE, FRAME_MASK], [LATENT])
    graph_file.unlink()
    weights = {t.name: t for t in onnx.load(str(model)).graph.initializer if t.name.startswith("dec.")}
    tensors = {name: np.array(numpy_helper.to_array(tensor), np.float32) for name, tensor in weights.items()}
    save_file(tensors, folder / "decoder.safetensors")
    (folder / "voice.json").write_text(json.dumps(_voice(json.loads(config.read_text(encoding="utf-8")))))


def _expose_duration_noise(source: Path, target: Path) -> None:
    model = onnx.load(str(source))
    graph = model.graph
    for node in [node for node in graph.node if DURATION_NOISE in node.output]:
        graph.node.remove(node)
    graph.input.append(helper.make_tensor_value_info(DURATION_NOISE, TensorProto.FLOAT, [1, 2, "phonemes"]))
    del graph.value_info[:]
    for name, shape in ((PRIOR_MEAN, [1, 192, "f"]), (PRIOR_SAMPLE, [1, 192, "f"]), (FRAME_MASK, [1, 1, "f"])):
        graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    for name in (PRIOR_DEVIATION, LATENT):
        graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 192, "f"]))
    onnx.save(model, str(target))


def _extract(source: Path, target: Path, inputs: list[str], outputs: list[str]) -> None:
    extract_model(str(source), str(target), inputs, outputs, check_model=False, infer_shapes=False)


def _voice(config: dict[str, Any]) -> dict[str, Any]:
    inference = config["inference"]
    return {
        "sample_rate": config["audio"]["sample_rate"],
        "noise_scale": inference["noise_scale"],
        "duration_noise_scale": inference["noise_w"],
        "length_scale": inference["length_scale"],
        "phoneme_ids": {phoneme: ids[0] for phoneme, ids in config["phoneme_id_map"].items()},
    }
