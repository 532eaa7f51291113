"""toydit through the whole runtime: every picture is the one that the formula gives."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from omnistage.errors import ErrorCode
from omnistage.request import FinishReason, OmniRequest
from omnistage.testing.toydit_stage import ToyParams, picture
from tests.engines import answer, running


def assert_picture(image: Any, prompt: str, seed: int, **params: Any) -> None:
    right = picture(prompt, ToyParams(**params), seed)
    assert image.shape == right.shape
    assert np.abs(image.astype(int) - right).max() <= 1


@pytest.mark.parametrize("placement", ["inline", "process"])
async def test_many_mixed_requests_give_the_pictures_of_the_formula(placement: str) -> None:
    sizes = [(32, 32), (64, 16), (8, 24)]
    async with running("toydit", {"placement": placement}) as engine:
        asks = [
            {"height": sizes[i % 3][0], "width": sizes[i % 3][1], "num_inference_steps": 1 + i, "guidance_scale": i / 2}
            for i in range(9)
        ]
        results = await asyncio.gather(
            *(answer(engine, id=f"r{i}", prompt=f"p{i}", seed=i, params=ask) for i, ask in enumerate(asks))
        )
    for index, (result, ask) in enumerate(zip(results, asks, strict=True)):
        assert result.error is None
        assert_picture(result.tensors["image"], f"p{index}", index, **ask)


async def test_unseeded_request_reports_the_seed_that_it_drew() -> None:
    async with running("toydit", {"placement": "inline"}) as engine:
        result = await answer(engine, id="a", prompt="p")
        assert result.seed is not None
        assert_picture(result.tensors["image"], "p", result.seed)


async def test_progress_and_partial_pictures_are_streamed_before_the_picture() -> None:
    async with running("toydit", {"placement": "inline", "stages.dit.step_delay_s": 0.01}) as engine:
        request = OmniRequest(
            id="a", prompt="p", modalities=("image", "progress", "partial"), params={"partial_images": 1}
        )
        events = [event async for event in engine.generate(request)]
    kinds = [event.modality for event in events if event.payload is not None and not event.final]
    assert kinds.count("progress") == 4
    assert kinds.count("partial") == 1
    order = [event.modality for event in events if event.payload is not None and event.payload.tensors]
    assert order == ["partial", "image"]


async def test_abort_stops_the_denoiser_within_one_step() -> None:
    async with running("toydit", {"placement": "inline", "stages.dit.step_delay_s": 0.02}) as engine:
        request = OmniRequest(id="a", prompt="p", modalities=("image", "progress"), params={"num_inference_steps": 500})
        seen = 0
        async for event in engine.generate(request):
            seen += event.modality == "progress"
            if seen == 3:
                await engine.abort("a")
            if event.finished:
                assert event.finish_reason == FinishReason.ABORT
        after = await answer(engine, id="b", prompt="p", params={"num_inference_steps": 1})
        assert after.metrics is not None
        # 3 steps of "a" were seen, one more may have been under way; then only the step of "b".
        (replica,) = engine.runtime.replicas.values()
    assert replica.counters["steps"] <= 3 + 2 + 1


async def test_bad_parameter_names_itself() -> None:
    async with running("toydit", {"placement": "inline"}) as engine:
        result = await answer(engine, id="a", prompt="p", params={"width": 12})
    assert result.error is not None
    assert (result.error.code, result.error.param, result.error.stage) == (ErrorCode.INVALID_REQUEST, "width", "dit")
