"""The family through the whole runtime, against diffusers' pipeline on the same weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnistage.errors import ErrorCode
from omnistage.request import OmniRequest
from tests.engines import running
from tests.models.minimax_h3 import tiny
from tests.models.minimax_h3.harness import ASKS, FP32, answer, assert_equals_reference, submission
from tests.models.minimax_h3.reference import Outcome, Reference

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(reference: Reference) -> dict[str, Outcome]:
    return {name: reference.run(seed, **ask) for seed, (name, ask) in enumerate(ASKS.items())}


@pytest.mark.parametrize("variant", ["default", "split"])
async def test_every_task_equals_the_reference(checkpoint: Path, outcomes: dict[str, Outcome], variant: str) -> None:
    async with running(str(checkpoint), FP32 | {"variant": variant}) as engine:
        for seed, (name, ask) in enumerate(ASKS.items()):
            result = await answer(engine, name, seed, ask)
            assert_equals_reference(result, outcomes[name])
            assert result.meta == {"fps": 24, "sample_rate": tiny.RATE}
            assert result.seed == seed


async def test_split_over_processes_gives_the_same(checkpoint: Path, outcomes: dict[str, Outcome]) -> None:
    overrides = {"variant": "split", "placement": "process", "dtype": "float32"}
    async with running(str(checkpoint), overrides) as engine:
        results = await asyncio.gather(
            *(answer(engine, name, seed, ask) for seed, (name, ask) in enumerate(ASKS.items()))
        )
    for result in results:
        assert_equals_reference(result, outcomes[result.request_id])


@pytest.mark.parametrize("variant", ["default", "split"])
async def test_answer_tells_the_time_of_each_phase(checkpoint: Path, variant: str) -> None:
    async with running(str(checkpoint), FP32 | {"variant": variant}) as engine:
        result = await answer(engine, "a", 1, ASKS["first"])
    assert result.metrics is not None
    told: dict[str, float] = {}
    for stage in result.metrics.stages.values():
        told |= {name: seconds for name, seconds in stage.extra.items() if seconds > 0}
    assert {"prompt_encode_s", "media_encode_s", "denoise_s", "video_decode_s", "audio_decode_s"} <= told.keys()
    assert told["transformer_calls"] == 2


@pytest.mark.parametrize(("wanted", "variant"), [("video", "split"), ("audio", "split"), ("video", "default")])
async def test_only_what_is_wanted_comes(checkpoint: Path, wanted: str, variant: str) -> None:
    async with running(str(checkpoint), FP32 | {"variant": variant}) as engine:
        result = await answer(engine, "a", 1, ASKS["text"], modalities=(wanted,))
    assert result.error is None
    assert set(result.tensors) == {wanted, "latents", "audio_latents"}


async def test_latents_alone_need_no_decoder(checkpoint: Path, outcomes: dict[str, Outcome]) -> None:
    async with running(str(checkpoint), FP32 | {"variant": "split"}) as engine:
        result = await answer(engine, "a", 0, ASKS["text"], modalities=("latents", "progress"))
        assert result.metrics is not None
        assert set(result.metrics.stages) == {"encoder", "diffusion"}
    assert np.abs(result.tensors["latents"] - outcomes["text"].latents).max() <= 1e-4


@pytest.mark.parametrize("variant", ["default", "split"])
async def test_noise_of_the_client_replaces_the_draw(checkpoint: Path, reference: Reference, variant: str) -> None:
    draw = np.random.default_rng(3)
    own = {
        "latents": draw.normal(size=(1, tiny.CHANNELS, 37, 2, 4)).astype(np.float32),
        "audio_latents": draw.normal(size=(2, tiny.AUDIO_CHANNELS, 207)).astype(np.float32),
    }
    import torch

    for names in (("latents",), ("latents", "audio_latents")):
        given = {name: own[name] for name in names}
        right = reference.run(4, **ASKS["text"], **{name: torch.from_numpy(given[name]) for name in names})
        async with running(str(checkpoint), FP32 | {"variant": variant}) as engine:
            assert_equals_reference(await answer(engine, "a", 4, ASKS["text"] | given), right)


async def test_task_given_as_request_task_or_parameter_must_fit(checkpoint: Path, outcomes: dict[str, Outcome]) -> None:
    async with running(str(checkpoint), FP32) as engine:
        assert_equals_reference(await answer(engine, "a", 0, ASKS["text"], task="t2va"), outcomes["text"])
        wrong = await answer(engine, "b", 0, ASKS["text"], task="ref2va")
    assert wrong.error is not None
    assert (wrong.error.code, wrong.error.param) == (ErrorCode.INVALID_REQUEST, "task")


async def test_aborted_request_takes_no_further_step(checkpoint: Path) -> None:
    long = ASKS["text"] | {"num_inference_steps": 400}
    request, media = submission("a", 1, long, modalities=("video", "progress"))
    async with running(str(checkpoint), FP32) as engine:
        seen = 0
        async for event in engine.generate(request, media):
            seen += event.modality == "progress"
            if seen == 3:
                await engine.abort("a")
        after = await answer(engine, "b", 0, ASKS["text"])
        assert after.error is None
        (replica,) = engine.runtime.replicas.values()
    assert replica.counters["steps"] <= 3 + 20 + 3


@pytest.mark.parametrize("partition", ["transformer", "transformer_ref", "both"])
async def test_partition_chosen_by_configuration_serves_its_tasks_only(
    checkpoint: Path, outcomes: dict[str, Outcome], partition: str
) -> None:
    served = {"transformer": ["first"], "transformer_ref": ["pictures"], "both": ["first", "pictures"]}[partition]
    async with running(str(checkpoint), FP32 | {"stages.diffusion.partition": partition}) as engine:
        for seed, (name, ask) in enumerate(ASKS.items()):
            if name in served:
                assert_equals_reference(await answer(engine, name, seed, ask), outcomes[name])
            elif name in ("first", "pictures"):
                refused: Any = (await answer(engine, name, seed, ask)).error
                assert refused.param == "task"


async def test_error_of_a_request_names_its_parameter_and_stage(checkpoint: Path) -> None:
    async with running(str(checkpoint), FP32 | {"variant": "split"}) as engine:
        result = await answer(engine, "a", 0, ASKS["text"] | {"width": 48})
    assert result.error is not None
    assert (result.error.param, result.error.stage) == ("width", "encoder")


async def test_request_without_seed_reports_the_one_it_drew(checkpoint: Path) -> None:
    async with running(str(checkpoint), FP32) as engine:
        request, media = submission("a", 0, ASKS["text"])
        request.seed = None
        last = [event async for event in engine.generate(request, media)][-1]
        assert isinstance(request, OmniRequest)
    assert last.seed is not None


@pytest.mark.parametrize("variant", ["default", "split"])
async def test_half_precision_stays_near_the_reference(
    checkpoint: Path, outcomes: dict[str, Outcome], variant: str
) -> None:
    overrides = {"placement": "inline", "dtype": "bfloat16", "variant": variant}
    async with running(str(checkpoint), overrides) as engine:
        for name in ("both", "mixed"):
            result = await answer(engine, name, list(ASKS).index(name), ASKS[name])
            assert result.error is None
            assert np.abs(result.tensors["latents"] - outcomes[name].latents).max() < 0.2
            assert np.abs(result.tensors["audio"] - outcomes[name].audio).max() < 0.2


async def test_picture_of_several_tiles_equals_the_reference(checkpoint: Path, reference: Reference) -> None:
    """The video autoencoder works in tiles of 256 pixels."""
    ask = {"prompt": "wide", "height": 64, "width": 288, "num_inference_steps": 2, "image": tiny.picture(1, 64, 200)}
    right = reference.run(6, **ask)
    async with running(str(checkpoint), FP32) as engine:
        assert_equals_reference(await answer(engine, "a", 6, ask), right)
