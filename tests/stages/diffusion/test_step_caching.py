"""A step cache as a stage's default: read where the pipeline has it, refused where it has not."""

from __future__ import annotations

from typing import Any

import pytest

from omnistage.config.resolve import resolve_config
from omnistage.errors import ConfigError
from omnistage.ops.step_policy import StepCache
from omnistage.stages.diffusion.step_caching import stage_cache, with_stage_cache


def cache_of(**deploy: Any) -> StepCache | None:
    config = resolve_config("tiny-shapes", None, {f"stages.painter.{key}": value for key, value in deploy.items()})
    return stage_cache(config.stages["painter"].options)


def test_no_step_cache_unless_asked_for() -> None:
    assert cache_of() is None
    assert with_stage_cache({"a": 1}, None) == {"a": 1}


def test_each_kind_reads_its_number() -> None:
    assert cache_of(step_cache="fixed_budget", step_cache_runs=5) == StepCache(kind="fixed_budget", runs=5)
    change = cache_of(step_cache="relative_change", step_cache_threshold=0.5)
    assert change == StepCache(kind="relative_change", threshold=0.5)


def test_request_beats_the_stage_and_null_is_none() -> None:
    cache = StepCache(kind="fixed_budget", runs=5)
    assert with_stage_cache({}, cache)["step_cache"]["runs"] == 5
    assert with_stage_cache({"step_cache": None}, cache) == {"step_cache": None}


@pytest.mark.parametrize(
    ("key", "value"), [("step_cache", "magic"), ("step_cache_runs", 1), ("step_cache_threshold", -1.0)]
)
def test_bad_value_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"stages.painter.{key}"):
        cache_of(**{key: value})


def test_a_pipeline_without_step_caches_refuses_the_key() -> None:
    with pytest.raises(ConfigError, match=r"stages\.dit.*step_cache"):
        resolve_config("toydit", None, {"stages.dit.step_cache": "fixed_budget"})
