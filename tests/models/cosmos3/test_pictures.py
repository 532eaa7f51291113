"""Pictures on their way out: previews while a request denoises, one decode for requests of equal shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from omnistage.errors import RequestError
from omnistage.models.cosmos3 import decoding
from omnistage.models.cosmos3.codecs import pixels_of
from omnistage.payload import Array
from omnistage.stages.base import StepOutput
from tests.models.cosmos3.asks import ask_of
from tests.models.cosmos3.conftest import Make
from tests.models.cosmos3.test_stage import Bench
from tests.stages.diffusion.fakes import AtOnce

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers.*")]


def arrays(outputs: list[StepOutput], port: str) -> dict[str, list[Array]]:
    found: dict[str, list[Array]] = {}
    for emission in (emission for output in outputs for emission in output.emissions if emission.port == port):
        if emission.payload.tensors:
            name = "image" if port == "partial" else port
            found.setdefault(emission.request_id, []).append(emission.payload[name])
    return found


@pytest.mark.parametrize("kind", ["base", "edge", "distilled"])
def test_previews_show_where_the_steps_point_to(tiny: Make, kind: str) -> None:
    bench = Bench(tiny(kind).folder, executor=AtOnce())
    bench.add("a", ask_of(kind, "image") | {"partial_images": 2, "modalities": ["image", "partial"]})
    state = bench.engine._entries["a"].state
    expected: list[torch.Tensor] = []
    outputs: list[StepOutput] = []
    while bench.engine.has_work():
        outputs.append(bench.engine.step())
        if state.step > len(expected) and state.expected is not None:
            expected.append(state.expected)
    previews, (whole,) = arrays(outputs, "partial")["a"], arrays(outputs, "image")["a"]
    steps = state.ask.steps
    assert len(previews) == 2
    pictures = bench.model._parts.pictures  # type: ignore[attr-defined]
    for shown, done in zip(previews, (steps // 3, steps * 2 // 3), strict=True):
        assert np.array_equal(shown, pixels_of(pictures.decode(expected[done - 1])).numpy())
    assert shown.shape == whole.shape
    (latents,) = arrays(outputs, "latents")["a"]
    if kind != "distilled":  # a stochastic schedule adds noise to the end
        np.testing.assert_allclose(expected[steps - 1].numpy(), latents, atol=1e-5)  # the last step goes all the way
    bench.engine.close()


def test_previews_of_videos_are_refused(tiny: Make) -> None:
    bench = Bench(tiny("base").folder)
    with pytest.raises(RequestError, match="partial_images"):
        bench.add("a", ask_of("base", "video") | {"partial_images": 1})
    bench.engine.close()


@pytest.mark.parametrize(("pixels", "calls"), [(1 << 20, [3, 1]), (2 * 32 * 48, [2, 1, 1]), (1, [1, 1, 1, 1])])
def test_finished_requests_of_equal_shape_are_decoded_in_one_call(
    tiny: Make, monkeypatch: pytest.MonkeyPatch, pixels: int, calls: list[int]
) -> None:
    monkeypatch.setattr(decoding, "MAX_PIXELS", pixels)
    asks: dict[str, dict[str, Any]] = {
        name: ask_of("base", "video_unguided") | {"seed": seed, "num_inference_steps": 2}
        for seed, name in enumerate(("a", "b", "c"))
    }
    asks["longer"] = ask_of("base", "video_unguided") | {"num_frames": 13, "num_inference_steps": 2}
    alone: dict[str, Array] = {}
    for name, ask in asks.items():
        bench = Bench(tiny("base").folder)
        bench.add(name, ask)
        ((alone[name],),) = arrays(bench.run(), "video").values()
        bench.engine.close()
    bench = Bench(tiny("base").folder)
    seen: list[int] = []
    vae = bench.model._parts.pictures._vae  # type: ignore[attr-defined]
    decode = vae.decode

    def spy(latents: torch.Tensor) -> Any:
        seen.append(len(latents))
        return decode(latents)

    monkeypatch.setattr(vae, "decode", spy)
    for name, ask in asks.items():
        bench.add(name, ask)
    together = arrays(bench.run(), "video")
    bench.engine.close()
    assert seen == calls
    for name, pictures in alone.items():
        assert np.abs(pictures.astype(int) - together[name][0]).max() <= 1
