"""The component of the text stage: the generic text model on a folder, or on what a GGUF file converts to."""

from __future__ import annotations

from pathlib import Path

from omnistage.config.model import StageContext
from omnistage.errors import ConfigError
from omnistage.models import gguf
from omnistage.stages.ar.text_model import CausalTextModel, TextState, backend_of
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.weights import conversion_key, converted, file_sha256

CONVERTER_VERSION = 1


def create(context: StageContext) -> TorchBackend[TextState]:
    """Component factory of the stage `thinker`. Raises ConfigError without a model."""
    if not context.model_path:
        raise ConfigError("causal-lm needs a model: a folder, a hub id or a GGUF file", param="model")
    folder = _folder(Path(context.model_path), Path(context.config.cache_dir))
    return backend_of(CausalTextModel(folder, context.stage, markup=context.spec.markup), context)


def _folder(path: Path, cache_dir: Path) -> Path:
    if path.suffix != ".gguf":
        return path
    key = conversion_key((file_sha256(path),), CONVERTER_VERSION)
    return converted(path.stem.lower(), key, cache_dir, lambda folder: gguf.convert(path, folder))
