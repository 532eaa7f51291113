"""The model families: one line each. A family's module is imported only when its name is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from omnistage.config.model import PipelineConfig
from omnistage.config.user_code import USER_CODE
from omnistage.errors import ConfigError, hint_for

PIPELINES: dict[str, str] = {
    "smol-speech": "omnistage.models.smol_speech.pipeline:PIPELINE",
    "causal-lm": "omnistage.models.causal_lm.pipeline:PIPELINE",
    "cosmos3": "omnistage.models.cosmos3.pipeline:PIPELINE",
    "hunyuan_image3": "omnistage.models.hunyuan_image3.pipeline:PIPELINE",
    "minimax_h3": "omnistage.models.minimax_h3.pipeline:PIPELINE",
    "qwen3_omni": "omnistage.models.qwen3_omni.pipeline:PIPELINE",
    "tiny-shapes": "omnistage.models.tiny_shapes.pipeline:PIPELINE",
    "echo3": "omnistage.testing.echo3:PIPELINE",
    "toydit": "omnistage.testing.toydit:PIPELINE",
    "ar2dit": "omnistage.testing.ar2dit:PIPELINE",
}
# Single-file checkpoints, by suffix.
FILE_PIPELINES: dict[str, str] = {".gguf": "causal-lm"}


def load_pipeline(name: str) -> PipelineConfig:
    """The declaration of a built-in pipeline, or of one in a user's file. Raises ConfigError with the nearest name."""
    if name.startswith(USER_CODE):
        load: Callable[[str], PipelineConfig] = vars(importlib.import_module("omnistage.kit.files"))["load"]
        return load(name)
    target = PIPELINES.get(name)
    if target is None:
        raise ConfigError(f"pipeline: unknown name {name!r}; {hint_for(name, PIPELINES)}", param="pipeline")
    module, _, attribute = target.partition(":")
    pipeline = vars(importlib.import_module(module))[attribute]
    if not isinstance(pipeline, PipelineConfig):
        raise ConfigError(f"pipeline: {target} is not a PipelineConfig", param="pipeline")
    return pipeline


def pipeline_for_architecture(architecture: str) -> str | None:
    """The name of the pipeline that serves a checkpoint whose config names `architecture`."""
    for name in PIPELINES:
        if architecture in load_pipeline(name).architectures:
            return name
    return None
