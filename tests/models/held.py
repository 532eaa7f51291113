"""What the modules of a component really hold, beside what its family declares."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from omnistage.config.model import StageContext
from omnistage.config.registry import load_pipeline
from omnistage.config.resolve import resolve_config
from omnistage.ops.blocked import BlockedConv1d, BlockedConvTranspose1d, BlockedLinear
from omnistage.ops.quantize import Int4Linear, Int8Linear
from omnistage.runtime.memory_plan import decided
from omnistage.shared import SharedObjects
from omnistage.stages.factory import _load


def tensors_in_modules() -> list[Tensor]:
    """Every parameter, packed weight and block of all modules alive."""
    gc.collect()
    tensors: list[Tensor] = []
    for module in [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]:
        tensors += module.parameters(recurse=False)
        tensors += module.buffers(recurse=False) if isinstance(module, Int4Linear | Int8Linear) else []
        if isinstance(module, BlockedLinear | BlockedConv1d | BlockedConvTranspose1d):
            tensors.append(module._blocks)
    return list({id(tensor): tensor for tensor in tensors if tensor.device.type != "meta"}.values())


def declared_and_held(folder: Path | str, stage: str, **settings: Any) -> tuple[int, int]:
    """Bytes of weights that `omnistage plan` counts for a stage, and that its component then holds."""
    config = resolve_config(str(folder), None, {"dtype": "float32", "device": "cpu"} | settings)
    pipeline = load_pipeline(config.pipeline)
    spec = next(spec for spec in pipeline.variants[config.variant].stages if spec.name == stage)
    assert pipeline.footprint is not None
    footprint = pipeline.footprint(config, decided(config.stages[stage]))
    before = tensors_in_modules()
    context = StageContext(
        config=config, stage=config.stages[stage], spec=spec, model_path=config.model_path, shared=SharedObjects()
    )
    component = _load(spec.component)(context)
    after = tensors_in_modules()
    known = {id(tensor) for tensor in before}
    held = sum(tensor.numel() * tensor.element_size() for tensor in after if id(tensor) not in known)
    del component
    return sum(part.held for part in footprint.weights.values()), held
