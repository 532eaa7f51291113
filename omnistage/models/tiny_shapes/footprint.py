"""What the stages take of memory. Torch-free."""

from __future__ import annotations

from pathlib import Path

from omnistage.config.footprint import Footprint
from omnistage.config.model import OmniConfig, StageConfig
from omnistage.models.smollm2 import SMOLLM2
from omnistage.models.weight_files import copied, tensors_of, text_footprint

_WEIGHTS = Path(__file__).parent / "weights"


def footprint(config: OmniConfig, stage: StageConfig) -> Footprint:
    """Raises WeightError for damaged weights."""
    if stage.name == "painter":
        name = "painter" if config.variant == "default" else "hidden_painter"
        weights = {name: copied(tensors_of(_WEIGHTS / f"{name}.safetensors"), "float32")}
        return Footprint(weights=weights, library="torch")
    folder = SMOLLM2.cached(config.model_path, config.cache_dir)
    if folder is None:
        return Footprint(weights={}, missing=(SMOLLM2.name,))
    return text_footprint(folder, stage, keeps_hidden=True)
