"""The thinker: SmolLM2-135M-Instruct on the generic text model of the AR engine."""

from __future__ import annotations

from omnistage.config.model import StageContext
from omnistage.models.smollm2 import SMOLLM2
from omnistage.stages.ar.text_model import CausalTextModel, TextState, backend_of
from omnistage.stages.ar.torch_backend import TorchBackend


def create(context: StageContext) -> TorchBackend[TextState]:
    """Component factory of the stage `thinker`."""
    folder = SMOLLM2.locate(context.model_path, context.config.cache_dir)
    return backend_of(CausalTextModel(folder, context.stage, markup=context.spec.markup), context)
