"""Step batching of any mix: as many transformer calls as ticks, and nobody changes anybody's result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import MiniMaxH3Transformer3DModel

from tests.models.minimax_h3.harness import ASKS, OneStage, assert_equals_reference
from tests.models.minimax_h3.reference import Outcome, Reference

pytestmark = pytest.mark.slow

APART = ("text", "pictures", "first", "mixed")
COMMON = ("text", "first", "last", "both")


@pytest.fixture(scope="module")
def stage(checkpoint: Path) -> OneStage:
    return OneStage(checkpoint)


@pytest.fixture(scope="module")
def ten() -> dict[str, dict[str, Any]]:
    """Ten requests of both tasks of one transformer, with different shapes, steps and shifts."""
    made = {}
    for number in range(10):
        name = COMMON[number % 4]
        made[f"r{number}"] = ASKS[name] | {"num_inference_steps": 2 + number % 5, "prompt": "x" * (1 + 7 * number)}
    return made


@pytest.fixture(scope="module")
def right(reference: Reference, ten: dict[str, dict[str, Any]]) -> dict[str, Outcome]:
    return {name: reference.run(seed, **ask) for seed, (name, ask) in enumerate(ten.items())}


@pytest.fixture(scope="module")
def outcomes(reference: Reference) -> dict[str, Outcome]:
    return {name: reference.run(seed, **ASKS[name]) for seed, name in enumerate(APART)}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the real transformer."""
    seen: list[int] = []
    original = MiniMaxH3Transformer3DModel.forward

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(kwargs["token_tags"]))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MiniMaxH3Transformer3DModel, "forward", spy)
    return seen


def test_ten_requests_admitted_together_share_their_calls(
    stage: OneStage, ten: dict[str, dict[str, Any]], right: dict[str, Outcome], calls: list[int]
) -> None:
    ticks = stage.engine.counters()["ticks"]
    for seed, (name, ask) in enumerate(ten.items()):
        stage.add(name, seed, ask)
    results = stage.run()
    alone = sum(ask["num_inference_steps"] - 1 for ask in ten.values())
    assert len(calls) == stage.engine.counters()["ticks"] - ticks
    assert len(calls) <= alone // 2
    for name in ten:
        assert_equals_reference(results[name], right[name], 1e-5)


def test_requests_that_join_at_each_step_equal_those_that_run_alone(
    stage: OneStage, ten: dict[str, dict[str, Any]], right: dict[str, Outcome], calls: list[int]
) -> None:
    ticks = stage.engine.counters()["ticks"]
    for seed, (name, ask) in enumerate(ten.items()):
        stage.add(name, seed, ask)
        stage.step()
    results = stage.run()
    assert (
        len(calls) == stage.engine.counters()["ticks"] - ticks < sum(a["num_inference_steps"] - 1 for a in ten.values())
    )
    for name in ten:
        assert_equals_reference(results[name], right[name], 1e-5)


def test_abort_in_the_middle_leaves_the_others_as_they_are(
    stage: OneStage, ten: dict[str, dict[str, Any]], right: dict[str, Outcome]
) -> None:
    stage.add("gone", 99, ASKS["both"] | {"num_inference_steps": 50})
    for seed, name in enumerate(list(ten)[:3]):
        stage.add(name, seed, ten[name])
    stage.step()
    stage.engine.abort("gone")
    results = stage.run()
    for name in list(ten)[:3]:
        assert_equals_reference(results[name], right[name], 1e-5)
    assert stage.engine.request_ids() == frozenset()


def test_references_run_on_their_own_transformer_beside_the_others(
    stage: OneStage, outcomes: dict[str, Outcome], calls: list[int]
) -> None:
    ticks = stage.engine.counters()["ticks"]
    for seed, name in enumerate(APART):
        stage.add(name, seed, ASKS[name])
    results = stage.run()
    for name in APART:
        assert_equals_reference(results[name], outcomes[name], 1e-5)
    assert len(calls) == stage.engine.counters()["ticks"] - ticks < 3 + 2 + 2 + 2


def test_step_that_fails_changes_no_request(stage: OneStage, right: dict[str, Outcome], ten: dict[str, Any]) -> None:
    stage.add("r0", 0, ten["r0"] | {"num_inference_steps": 4})
    stage.step()
    (entry,) = stage.engine._entries.values()
    before = entry.state.prepared.video.clone()  # type: ignore[union-attr]
    original, entry.state.sigmas = entry.state.sigmas, entry.state.sigmas[:1]
    with pytest.raises(IndexError):
        stage.model.denoise([entry.state])
    entry.state.sigmas = original
    assert entry.state.step == 1
    assert np.array_equal(entry.state.prepared.video.numpy(), before.numpy())  # type: ignore[union-attr]
    stage.engine.abort("r0")


def test_a_step_cache_skips_its_own_steps_and_leaves_the_others_as_they_are(stage: OneStage) -> None:
    cache = {"kind": "fixed_budget", "runs": 3}
    plain = ASKS["text"] | {"num_inference_steps": 7}
    other = ASKS["first"] | {"num_inference_steps": 6}

    def both(cached: dict[str, Any] | None) -> dict[str, Any]:
        stage.add("cached", 0, plain | ({"step_cache": cached} if cached else {}))
        stage.add("other", 1, other)
        return dict(stage.run())

    without, with_cache = both(None), both(cache)
    for name in ("latents", "audio_latents", "video"):
        assert np.array_equal(without["other"][name], with_cache["other"][name])
        assert not np.array_equal(without["cached"][name], with_cache["cached"][name])
    assert (stage.skipped["cached"], stage.skipped["other"]) == (3.0, 0.0)
