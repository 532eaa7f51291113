"""The stage's own step cache: deploy keys of the pipelines that can leave steps out. Torch-free.

A pipeline adds `STEP_CACHE` to the options of its stage; without them the keys are unknown, and refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from omnistage.config.model import OptionSpec
from omnistage.ops.step_policy import StepCache

_NONE = "none"
STEP_CACHE: dict[str, OptionSpec] = {
    "step_cache": OptionSpec(
        "str",
        _NONE,
        choices=(_NONE, "relative_change", "fixed_budget"),
        help="step cache of requests that name none of their own (one that says null has none)",
    ),
    "step_cache_threshold": OptionSpec(
        "float", 0.2, 0, 100, help="relative_change: the summed relative change of its input after which a step runs"
    ),
    "step_cache_runs": OptionSpec("int", 8, 2, 1000, help="fixed_budget: how many steps run"),
}


def stage_cache(options: Mapping[str, Any]) -> StepCache | None:
    """The step cache that the stage's options ask for."""
    if options["step_cache"] == _NONE:
        return None
    return StepCache(
        kind=options["step_cache"], threshold=options["step_cache_threshold"], runs=options["step_cache_runs"]
    )


def with_stage_cache(params: Mapping[str, Any], cache: StepCache | None) -> dict[str, Any]:
    """`params` of a request with the stage's step cache, unless it has its own (null: none)."""
    default = {} if cache is None else {"step_cache": msgspec.to_builtins(cache)}
    return default | dict(params)
