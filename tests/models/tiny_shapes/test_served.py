"""tiny-shapes through the whole engine, with its real weights."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.errors import ErrorCode, OmniError
from omnistage.models.tiny_shapes.captions import caption, tokens
from omnistage.models.tiny_shapes.judge import load_judge, pictures_of, verdicts
from omnistage.models.tiny_shapes.network import Painter, load_weights
from omnistage.models.tiny_shapes.quality import asked_attributes
from omnistage.models.tiny_shapes.stage import WEIGHTS
from omnistage.request import OmniRequest
from tests.engines import answer, running

INLINE = {"placement": "inline"}
STAR = "a small red star at the top of a navy background"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@torch.inference_mode()
def alone(words: list[int], seed: int, steps: int, scale: float) -> np.ndarray:
    """The textbook loop on the network: final latents [1, 3, 32, 32]."""
    network = Painter()
    load_weights(network, WEIGHTS)
    picture = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    for at in range(steps):
        time = torch.tensor([1 - at / steps])
        guided = network(picture, time, torch.tensor([words]))
        free = network(picture, time, torch.zeros(1, len(words), dtype=torch.long))
        picture = picture - (free + scale * (guided - free)) / steps
    return picture.numpy()


async def test_mixed_requests_equal_the_plain_loop_and_share_calls() -> None:
    asked = asked_attributes(8)
    plans = [{"num_inference_steps": 2 + at, "guidance_scale": 1.0 + at / 4} for at in range(8)]
    async with running("tiny-shapes", INLINE) as engine:
        results = await asyncio.gather(
            *(
                answer(engine, id=f"r{at}", prompt=caption(one), seed=at, params=plan | {"return_latents": True})
                for at, (one, plan) in enumerate(zip(asked, plans, strict=True))
            )
        )
        (replica,) = engine.runtime.replicas.values()
    for at, (result, one) in enumerate(zip(results, asked, strict=True)):
        right = alone(tokens(one), at, 2 + at, 1.0 + at / 4)
        assert np.abs(result.tensors["latents"] - right).max() <= 1e-4
        pixels = ((right.clip(-1, 1) + 1) * 127.5).round().transpose(0, 2, 3, 1)
        assert np.abs(result.tensors["image"].astype(int) - pixels).max() <= 1
        assert result.meta["caption"] == caption(one)
    assert replica.counters["transformer_calls"] < sum(plan["num_inference_steps"] for plan in plans)


async def test_picture_is_enlarged_by_repeating_pixels() -> None:
    params = {"num_inference_steps": 2}
    async with running("tiny-shapes", INLINE) as engine:
        plain = await answer(engine, id="a", prompt=STAR, seed=1, params=params)
        large = await answer(engine, id="b", prompt=STAR, seed=1, params=params | {"size": "96x64"})
    assert plain.tensors["image"].shape == (1, 32, 32, 3)
    assert np.array_equal(large.tensors["image"], plain.tensors["image"].repeat(2, axis=1).repeat(3, axis=2))


async def test_cache_of_one_request_leaves_the_others_and_reports_its_skipped_steps() -> None:
    params = {"num_inference_steps": 12, "return_latents": True}
    cached = params | {"step_cache": {"kind": "fixed_budget", "runs": 4}}
    async with running("tiny-shapes", INLINE) as engine:
        before = await answer(engine, id="a", prompt=STAR, seed=1, params=params)
        both = await asyncio.gather(
            answer(engine, id="b", prompt=STAR, seed=1, params=params),
            answer(engine, id="c", prompt=STAR, seed=2, params=cached),
            answer(engine, id="d", prompt=STAR, seed=1, params=cached),
        )
    assert np.abs(both[0].tensors["latents"] - before.tensors["latents"]).max() <= 1e-5
    assert np.abs(both[2].tensors["latents"] - before.tensors["latents"]).max() > 1e-4
    for result, skipped in zip(both, (0, 8, 8), strict=True):
        assert result.metrics is not None
        assert result.metrics.stages["painter"].extra["skipped_steps"] == skipped


async def test_partial_pictures_come_before_the_picture_and_grow_like_it() -> None:
    request = OmniRequest(
        id="a",
        prompt=STAR,
        seed=1,
        modalities=("image", "partial"),
        params={"num_inference_steps": 8, "partial_images": 3},
    )
    async with running("tiny-shapes", INLINE) as engine:
        events = [event async for event in engine.generate(request)]
    pictures = [e.payload["image"].astype(int) for e in events if e.payload is not None and e.payload.tensors]
    kinds = [e.modality for e in events if e.payload is not None and e.payload.tensors]
    # Previews give way to the picture when the decode thread is slower than the steps; the first finds it idle.
    assert kinds in (["partial"] * count + ["image"] for count in (1, 2, 3))
    errors = [np.abs(picture - pictures[-1]).mean() for picture in pictures[:-1]]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 10 or len(errors) < 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a purple elephant"}, "prompt"),
        ({"params": {"size": "33x32"}}, "size"),
        ({"params": {"size": "32"}}, "size"),
        ({"params": {"width": 2048}}, "width"),
        ({"params": {"num_inference_steps": 0}}, "num_inference_steps"),
        ({"params": {"guidance": 2}}, "guidance"),
        ({"params": {"step_cache": {"kind": "fixed_budget", "runs": 1}}}, "step_cache.runs"),
        ({"params": {"step_cache": {"kind": "magic"}}}, "step_cache.kind"),
        ({"modalities": ("video",)}, "modalities"),
        ({"voice": "joe"}, "voice"),
    ],
)
async def test_bad_request_names_the_field(fields: dict[str, Any], param: str) -> None:
    async with running("tiny-shapes", INLINE) as engine:
        request = OmniRequest(**({"id": "a", "prompt": STAR} | fields))
        try:
            events = [event async for event in engine.generate(request)]
            error = events[-1].error
        except OmniError as refused:  # at admission
            error = refused.info
    assert error is not None
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, param)


async def test_a_conversation_draws_what_its_last_message_asks_for() -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    messages += [{"role": "user", "content": [{"type": "text", "text": "a blue heart"}]}]  # type: ignore[dict-item]
    async with running("tiny-shapes", INLINE) as engine:
        result = await answer(engine, id="a", messages=messages, params={"num_inference_steps": 1})
    assert result.meta["caption"] == "a large blue heart in the center of a white background"


@pytest.mark.slow
async def test_served_pictures_show_what_was_asked() -> None:
    """The share of pictures with all five attributes right, by the judge, is at least 0.9."""
    asked = asked_attributes(96)
    async with running("tiny-shapes", {"placement": "process"}) as engine:
        results = await asyncio.gather(
            *(answer(engine, id=f"r{at}", prompt=caption(one), seed=at) for at, one in enumerate(asked))
        )
    pictures = pictures_of(np.concatenate([result.tensors["image"] for result in results]))
    assert verdicts(load_judge(), pictures, asked).all(1).mean() >= 0.9
