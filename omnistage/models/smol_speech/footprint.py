"""What the stages take of memory. Torch-free. Constants are measured on the real weights (`omnistage plan`'s test)."""

from __future__ import annotations

from pathlib import Path

from omnistage.config.footprint import Footprint, Weights, Working
from omnistage.config.model import OmniConfig, StageConfig
from omnistage.models.smol_speech.artefacts import HEART, JOE, LISTENER
from omnistage.models.smollm2 import SMOLLM2
from omnistage.models.weight_files import joined, loaded, tensors_of, text_footprint

_FP32 = "float32"
# MiB: the tokenizer and tables of the feature extractor; word lists and rules of the phonemizer.
_HEARING_MB, _PHONEMES_MB = 42, 128
# MiB of a step, and of each window of 30 s or each stream in it.
_WINDOWS_MB, _STREAMS_MB = (30, 28), (32, 16)


def footprint(config: OmniConfig, stage: StageConfig) -> Footprint:
    """Weights that are not in the cache yet are named as missing. Raises WeightError for damaged ones."""
    artefacts = {"listener": (LISTENER,), "thinker": (SMOLLM2,)}.get(stage.name, (HEART, JOE))
    folders = [each.cached(config.model_path, config.cache_dir) for each in artefacts]
    missing = tuple(each.name for each, folder in zip(artefacts, folders, strict=True) if folder is None)
    found = [folder for folder in folders if folder is not None]
    if missing:
        return Footprint(weights={}, missing=missing)
    match stage.name:
        case "listener":
            weights = loaded(tensors_of(found[0]), _FP32)
            step = _step(stage, "windows", *_WINDOWS_MB)
            return Footprint(weights={"whisper": weights}, extra={"hearing": _HEARING_MB << 20}, working=step)
        case "thinker":
            return text_footprint(found[0], stage)
        case "talker":
            graphs = _graphs(found)
            return Footprint(weights={"voices": graphs}, extra={"phonemes": _PHONEMES_MB << 20}, library="onnxruntime")
        case _:
            voices = joined(loaded(tensors_of(folder), _FP32) for folder in found)
            step = _step(stage, "streams", *_STREAMS_MB)
            return Footprint(weights={"vocoders": voices}, working=step, library="torch")


def _step(stage: StageConfig, of: str, fixed_mb: int, each_mb: int) -> Working:
    most = fixed_mb + stage.max_num_seqs * each_mb
    return Working(most << 20, f"{stage.max_num_seqs} {of}", each_mb << 20)


def _graphs(folders: list[Path]) -> Weights:
    """onnxruntime makes its own copy of a graph's weights."""
    size = sum(file.stat().st_size for folder in folders for file in folder.glob("*.onnx"))
    return Weights(size, size)
