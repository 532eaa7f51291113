"""Builds the engine of a stage in the process that owns it. The only place that knows all three kinds."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from omnistage.config.model import StageContext
from omnistage.faults import Faults
from omnistage.stages.base import StageEngine


def build_engine(
    context: StageContext,
    wake: Callable[[], None],
    faults: Faults | None = None,
    executor: Executor | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> StageEngine:
    """Imports the stage's component, builds it, and puts the engine of its kind around it.

    `wake` may be called from any thread of the engine to have the loop look at `has_work` again; `executor` takes the
    place of the engine's own threads, `clock` gives it the time (seconds). Raises ConfigError or whatever the component
    raises for missing files or unfit weights.
    """
    component = _load(context.spec.component)(context)
    if context.stage.kind == "generation":
        from omnistage.stages.generation.engine import GenerationEngine

        generation: GenerationEngine[Any] = GenerationEngine(component, context.stage, faults, clock)
        return generation
    if context.stage.kind == "ar":
        from omnistage.stages.ar.engine import AREngine

        return AREngine(component, context.stage, clock, faults=faults)
    from omnistage.stages.diffusion.engine import DiffusionEngine

    diffusion: DiffusionEngine[Any] = DiffusionEngine(
        component, context.stage, wake, faults=faults, executor=executor, clock=clock
    )
    return diffusion


def _load(target: str) -> Callable[[StageContext], Any]:
    module, _, attribute = target.partition(":")
    factory: Callable[[StageContext], Any] = vars(importlib.import_module(module))[attribute]
    return factory
