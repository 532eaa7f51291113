"""Whole deployments: text alone, pictures alone, both in one process or in two; damage on the way; HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.omni import OmniResult
from omnistage.errors import ErrorCode
from omnistage.models.hunyuan_image3.backbone import Backbone
from omnistage.testing.faults import fault
from tests.engines import running
from tests.models.hunyuan_image3.harness import FOLDER, SCENARIOS, answer, overrides, submission

MODEL = str(FOLDER)
INLINE = {"placement": "inline"}
COT = SCENARIOS["cot"]
# One process for both stages is what the pipeline itself says.
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "two processes": {"stages.dit.placement": "process"},
    "threads": INLINE,
    "without handover": INLINE | {"stages.dit.kv_handover": False},
    "whole payloads": INLINE | {"edges.ar->dit.async_chunk": False},
    "request batching": INLINE | {"stages.dit.batching": "request"},
}


def right(result: OmniResult) -> OmniResult:
    assert result.error is None, result.error
    return result


async def drawn_alone(asks: list[dict[str, Any]]) -> list[OmniResult]:
    """Each request by itself, one after the other."""
    async with running(MODEL, overrides("ar_dit", **INLINE)) as engine:
        return [right(await answer(engine, f"alone{index}", ask)) for index, ask in enumerate(asks)]


MIXED: list[dict[str, Any]] = [
    COT,
    SCENARIOS["ratio"],
    SCENARIOS["t2i"] | {"bot_task": "image", "num_inference_steps": 6},
    COT | {"seed": 7, "guidance_scale": 1.0},
    COT | {"size": "128x512", "num_inference_steps": 2},
    SCENARIOS["t2i_pretrain"] | {"bot_task": "image"},
]


@pytest.mark.slow
@pytest.mark.parametrize("name", DEPLOYMENTS)
async def test_every_deployment_draws_the_same_alone_and_together(name: str) -> None:
    expected = await drawn_alone(MIXED)
    async with running(MODEL, overrides("ar_dit", **DEPLOYMENTS[name])) as engine:
        found = await asyncio.gather(*(answer(engine, f"r{i}", ask) for i, ask in enumerate(MIXED)))
    for got, wanted in zip(found, expected, strict=True):
        assert right(got).token_ids == wanted.token_ids
        assert np.abs(got.tensors["latents"] - wanted.tensors["latents"]).max() <= 1e-5


@pytest.mark.slow
async def test_pictures_alone_are_those_of_both_stages_and_the_text_is_that_of_the_text_stage_alone() -> None:
    ask = SCENARIOS["t2i"] | {"bot_task": "image"}
    (both, thoughts) = await drawn_alone([ask, COT])
    async with running(MODEL, overrides("dit", **INLINE)) as engine:
        alone = right(await answer(engine, "dit", ask))
    assert np.abs(alone.tensors["latents"] - both.tensors["latents"]).max() <= 1e-5
    async with running(MODEL, overrides("ar", **INLINE)) as engine:
        text = right(await answer(engine, "ar", COT, ("text",)))
    assert (text.text, text.token_ids) == (thoughts.text, thoughts.token_ids)


@pytest.mark.slow
async def test_latents_of_the_reference_through_the_whole_engine(arrays: dict[str, Any]) -> None:
    async with running(MODEL, overrides("dit", **INLINE)) as engine:
        names = ("t2i", "t2i_pretrain", "edit")
        found = await asyncio.gather(*(answer(engine, name, SCENARIOS[name], ("latents",)) for name in names))
    for name, result in zip(names, found, strict=True):
        assert np.abs(right(result).tensors["latents"][0] - arrays[f"{name}/latents"][-1]).max() <= 1e-4


@pytest.mark.slow
async def test_text_comes_before_the_picture_and_progress_between(small_folder: Path) -> None:
    request, media = submission("r", COT, ("text", "image", "progress"))
    order: list[str] = []
    async with running(str(small_folder), overrides("ar_dit", **INLINE)) as engine:
        async for output in engine.generate(request, media):
            if output.modality and output.modality not in order[-1:]:
                order.append(output.modality)
            if output.modality == "image" and output.payload is not None and output.payload.tensors:
                assert output.payload["image"].shape[::3] == (1, 3)
    assert order == ["text", "progress", "image", "progress"] or order == ["text", "progress", "image"]


@pytest.mark.slow
async def test_weights_are_loaded_once_for_stages_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counting(*args: Any) -> Any:
        made.append("backbone")
        return original(*args)

    original = Backbone
    monkeypatch.setattr("omnistage.models.hunyuan_image3.components.Backbone", counting)
    async with running(MODEL, overrides("ar_dit", **INLINE)):
        assert made == ["backbone"]


DAMAGE = {
    "lost before it was sent": ("ar", "after_store", "drop"),
    "lost on arrival": ("dit", "chunk_received", "drop"),
    "sent twice": ("ar", "after_store", "duplicate"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
async def test_a_handover_that_does_not_arrive_ends_the_request_by_name(name: str) -> None:
    """The thoughts are chunk 0 between the stages, the keys and values chunk 1."""
    stage, point, action = DAMAGE[name]
    settings = overrides("ar_dit", **INLINE, **{"edges.ar->dit.deadline_s": 0.5})
    damage = fault(stage, point, action, after=1, request="bad")  # type: ignore[arg-type]
    async with running(MODEL, settings | damage) as engine:
        result = await answer(engine, "bad", COT, ("latents",))
        assert result.error is not None
        assert result.error.code is ErrorCode.HANDOFF
        assert "latents" not in result.tensors
        right(await answer(engine, "good", COT, ("latents",)))


@pytest.mark.slow
async def test_refused_handovers_are_counted_in_the_metrics() -> None:
    async with running(MODEL, overrides("ar_dit", **INLINE)) as engine:
        result = right(await answer(engine, "r", COT, ("latents",)))
        assert result.metrics is not None
        extra = result.metrics.stages["dit"].extra
        assert (extra["kv_refused"], extra["kv_reused_rows"]) == (0, 38)
        assert b"kv_refused" in engine.render_metrics()


@pytest.mark.slow
async def test_an_abort_at_any_time_leaves_nothing_behind() -> None:
    async def aborted(engine: AsyncOmniEngine, name: str, outputs: int) -> None:
        request, media = submission(name, COT, ("text", "progress", "latents"))
        seen = 0
        async for _ in engine.generate(request, media):
            seen += 1
            if seen == outputs:
                return

    async with running(MODEL, overrides("ar_dit", **INLINE)) as engine:
        await asyncio.gather(*(aborted(engine, f"r{outputs}", outputs) for outputs in (1, 2, 4, 6, 7)))


@pytest.mark.slow
async def test_distilled_checkpoints_draw_with_one_row(distilled_folder: Path) -> None:
    async with running(str(distilled_folder), overrides("ar_dit", **INLINE)) as engine:
        ask = SCENARIOS["distil"] | {"bot_task": "image"}
        first, second = [right(await answer(engine, f"r{g}", ask | {"guidance_scale": g})) for g in (2.5, 5.0)]
        thought = right(await answer(engine, "cot", COT))
    assert first.tensors["latents"].shape == (1, 8, 12, 20)
    assert np.abs(first.tensors["latents"] - second.tensors["latents"]).max() > 1e-3
    assert thought.tensors["latents"].shape == (1, 8, 28, 8)
