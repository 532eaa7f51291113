"""What the text stage takes of memory. Torch-free."""

from __future__ import annotations

from pathlib import Path

from omnistage.config.footprint import Footprint
from omnistage.config.model import OmniConfig, StageConfig
from omnistage.models.gguf_header import read_gguf
from omnistage.models.weight_files import text_footprint, text_model


def footprint(config: OmniConfig, stage: StageConfig) -> Footprint:
    """Raises WeightError for a damaged folder or file."""
    path = Path(config.model_path)
    if path.suffix != ".gguf":
        return text_footprint(path, stage)
    header = read_gguf(path)
    return text_model(header.tensors, header.config, stage)
