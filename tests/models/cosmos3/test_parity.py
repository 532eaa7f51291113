"""Cosmos3 against the reference library, mode by mode and all together."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.omni import OmniResult, ResultBuilder
from omnistage.request import FinishReason
from tests.engines import running
from tests.models.cosmos3.asks import ASKS, CASES, ask_of, request_of
from tests.models.cosmos3.conftest import Make, Refer
from tests.models.cosmos3.tiny import Reference

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers.*")]

DEPLOY: dict[str, Any] = {"placement": "inline", "dtype": "float32", "device": "cpu"}


async def generate(engine: AsyncOmniEngine, kind: str, name: str) -> OmniResult:
    request, media = request_of(name, ask_of(kind, name))
    builder = ResultBuilder(name)
    async for output in engine.generate(request, media):
        builder.add(output)
    return builder.result().raise_for_error()


def assert_equal(result: OmniResult, right: Reference, tolerance: float = 1e-4) -> None:
    pixels = result.tensors.get("video", result.tensors.get("image"))
    assert pixels is not None
    assert pixels.shape == right.pixels.shape
    assert np.abs(pixels.astype(int) - right.pixels).max() <= 1
    np.testing.assert_allclose(result.tensors["latents"], right.latents, atol=tolerance, rtol=0)
    for name, reference in (("audio", right.sound), ("action", right.action)):
        assert (name in result.tensors) == (reference is not None)
        if reference is not None:
            np.testing.assert_allclose(result.tensors[name], reference, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("kind", "name"), CASES)
async def test_every_mode_equals_the_reference(tiny: Make, refer: Refer, kind: str, name: str) -> None:
    async with running(str(tiny(kind).folder), DEPLOY) as engine:
        result = await generate(engine, kind, name)
    assert_equal(result, refer(kind, name))


@pytest.mark.parametrize("placement", ["inline", "process"])
async def test_reasoner_and_generator_apart_give_the_same(tiny: Make, refer: Refer, placement: str) -> None:
    deploy = DEPLOY | {"variant": "split", "placement": placement}
    async with running(str(tiny("base").folder), deploy) as engine:
        names = list(ASKS["base"])
        results = await asyncio.gather(*(generate(engine, "base", name) for name in names))
    for name, result in zip(names, results, strict=True):
        assert_equal(result, refer("base", name))


@pytest.mark.parametrize("kind", ["base", "edge", "distilled"])
async def test_all_modes_together_give_the_same_as_each_alone(tiny: Make, kind: str) -> None:
    names = list(ASKS[kind])
    async with running(str(tiny(kind).folder), DEPLOY) as engine:
        alone = [await generate(engine, kind, name) for name in names]
        mixed = await asyncio.gather(*(generate(engine, kind, name) for name in names))
    for one, other in zip(alone, mixed, strict=True):
        for name, array in one.tensors.items():
            # Pictures of equal shape are decoded together, which may round a pixel the other way.
            levels = 1 if name in ("image", "video") else 0
            there = other.tensors[name].astype(np.float32)
            np.testing.assert_allclose(there, array, rtol=0, atol=levels, err_msg=f"{one.request_id} {name}")
            assert (there != array).mean() <= 0.01


async def test_same_seed_gives_the_same_bits_and_another_seed_does_not(tiny: Make) -> None:
    async with running(str(tiny("base").folder), DEPLOY) as engine:
        first = await generate(engine, "base", "video")
        second = await generate(engine, "base", "video")
        request, media = request_of("other", ask_of("base", "video") | {"seed": 99})
        builder = ResultBuilder("other")
        async for output in engine.generate(request, media):
            builder.add(output)
    np.testing.assert_array_equal(first.tensors["latents"], second.tensors["latents"])
    assert np.abs(first.tensors["latents"] - builder.result().tensors["latents"]).max() > 0.1


async def test_a_batch_mate_that_is_aborted_half_way_changes_nothing(tiny: Make) -> None:
    names = ["image", "sound", "policy_guided", "transfer_chunks"]
    async with running(str(tiny("base").folder), DEPLOY) as engine:
        alone = [await generate(engine, "base", name) for name in names]
        request, media = request_of("victim", ask_of("base", "video") | {"num_inference_steps": 100})
        request.modalities = ("video", "progress")
        victim = engine.generate(request, media)
        async for output in victim:
            if output.payload is not None and output.payload.meta.get("step") == 1:
                break  # it is denoising now
        others = [asyncio.create_task(generate(engine, "base", name)) for name in names]
        await asyncio.sleep(0.02)
        assert await engine.abort("victim")
        mixed = [await task for task in others]
        assert [output.finish_reason async for output in victim][-1] == FinishReason.ABORT
    for one, other in zip(alone, mixed, strict=True):
        for name, array in one.tensors.items():
            np.testing.assert_array_equal(array, other.tensors[name], err_msg=f"{one.request_id} {name}")
