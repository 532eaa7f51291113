"""The user's own file: imported once per process, only because a command names it."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from omnistage.config.model import PipelineConfig
from omnistage.config.user_code import parts_of
from omnistage.errors import ConfigError
from omnistage.kit.graph import KitPipeline, pipeline
from omnistage.kit.stage import Stage


def load(code: str) -> PipelineConfig:
    """The pipeline of a name like "py:/folder/file.py#NAME". Raises ConfigError, and what the user's code raises."""
    file, name = parts_of(code)
    found = vars(_module(file))
    if name:
        if not isinstance(found.get(name), (KitPipeline, Stage)):
            raise ConfigError(f"model: {file.name} has no stage or pipeline {name!r}", param="model")
        return _as_pipeline(found[name])
    pipelines = [value for value in found.values() if isinstance(value, KitPipeline)]
    chosen: list[KitPipeline | Stage] = [*pipelines] or [each for each in found.values() if isinstance(each, Stage)]
    if len(chosen) != 1:
        raise ConfigError(
            f"model: {file.name} has {len(chosen)} pipelines or stages; name one as {file.name}:NAME", param="model"
        )
    return _as_pipeline(chosen[0])


def _as_pipeline(value: KitPipeline | Stage) -> KitPipeline:
    return pipeline(value.name, value) if isinstance(value, Stage) else value


def _module(file: Path) -> ModuleType:
    name = f"omnistage_user_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"model: {file.name} cannot be imported", param="model")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
