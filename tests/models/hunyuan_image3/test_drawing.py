"""The drawing stage against the official pipeline, and against itself without anything that saves work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from omnistage.errors import StageError
from omnistage.models.hunyuan_image3.attention import Document, DocumentPlan, segments_of
from omnistage.models.hunyuan_image3.backbone import embedded
from omnistage.models.hunyuan_image3.denoiser import Denoiser
from omnistage.models.hunyuan_image3.drawing_stage import Drawer
from omnistage.models.hunyuan_image3.flight import Flight
from omnistage.models.hunyuan_image3.references import ReferenceEncoder, place
from omnistage.models.hunyuan_image3.rotary import positions
from tests.models.hunyuan_image3.conftest import Near
from tests.models.hunyuan_image3.harness import FOLDER, SCENARIOS, SMALL_EDIT, begin, draw

IMAGE = {"bot_task": "image"}


@pytest.mark.parametrize("name", ["t2i", "t2i_pretrain", pytest.param("edit", marks=pytest.mark.slow)])
@torch.inference_mode()
def test_every_step_is_that_of_the_reference(name: str, near: Near, drawer: Drawer, components: Any) -> None:
    flight = begin(drawer, SCENARIOS[name] | IMAGE)
    drawer.encode([flight])
    drawer.prepare(flight)
    near(f"{name}/init_noise", flight.ready().latents)
    denoiser, velocities, latents = Denoiser(components), [], []
    while drawer.remaining(flight):
        velocities.append(denoiser([flight])[0])
        drawer.denoise([flight])
        latents.append(flight.ready().latents[0])
    near(f"{name}/preds", torch.stack(velocities))
    near(f"{name}/latents", torch.stack(latents))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t2i", "t2i_pretrain"])
def test_pictures_are_those_of_the_reference(name: str, drawer: Drawer, arrays: dict[str, Any]) -> None:
    flight = begin(drawer, SCENARIOS[name] | IMAGE)
    draw(drawer, [flight])
    (made,) = drawer.decode([flight])
    picture = next(item.payload["image"] for item in made if item.port == "image")
    assert picture.shape == (1, 192, 320, 3)
    right = arrays[f"{name}/image_u8_stride4"].astype(int)
    assert np.abs(picture[0, ::4, ::4].astype(int) - right).max() <= 1


@torch.inference_mode()
@pytest.mark.slow
def test_latents_of_a_reference_picture(near: Near, drawer: Drawer, components: Any) -> None:
    flight = begin(drawer, SCENARIOS["edit"] | IMAGE)
    reference = drawer._references.read(flight.media["0"], flight.noise[0])
    near("edit/cond_latent_scaled", ReferenceEncoder(components).latents(reference))


@pytest.mark.parametrize(("name", "noise"), [("edit2", "edit2"), ("distil", "distil")])
def test_noise_of_the_other_scenarios(
    name: str, noise: str, near: Near, drawer: Drawer, distilled_drawer: Drawer, distilled_folder: Path
) -> None:
    chosen = distilled_drawer if name == "distil" else drawer
    flight = begin(chosen, SCENARIOS[name] | IMAGE, **({"folder": distilled_folder} if name == "distil" else {}))
    flight.branches = chosen._lay_out(flight)
    chosen.prepare(flight)
    near(f"{noise}/init_noise", flight.ready().latents)


def whole_row_velocities(drawer: Drawer, flight: Flight) -> Tensor:
    """The velocities of a step from whole rows, nothing cached: [branches, channels, h, w]."""
    components, denoiser = drawer._components, drawer._denoiser
    references = ReferenceEncoder(components)([drawer._read(flight, i) for i in range(len(flight.noise))])
    own, _ = denoiser._rows(flight)
    found = []
    for branch in flight.branches:
        layout, where = branch.layout, flight.place
        stop = where.image.stop
        rows = embedded(components.backbone(), layout.ids[:stop])
        place(rows, 0, layout, references)
        rows[where.timestep : stop] = own
        spans = [*(reference.joint for reference in layout.references), (where.image.start, stop)]
        plan = DocumentPlan([Document((), segments_of(0, stop, spans))])
        hidden = components.backbone()(rows, components.rotary(positions(layout.grids, 0, stop)), plan)
        time = components.times("time_embed_2")(torch.tensor([flight.ready().schedule.time(flight.step)]))
        found.append(components.final_layer()(hidden[None, where.image.start :], time, flight.grid))
    return torch.cat(found)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["t2i", "distil", pytest.param("small", marks=pytest.mark.slow)])
def test_cached_prompts_change_nothing(name: str, request: pytest.FixtureRequest) -> None:
    """Also of the distilled checkpoint, and with two reference pictures on the small one."""
    kind = {"distil": "distilled", "small": "small"}.get(name)
    chosen: Drawer = request.getfixturevalue(f"{kind}_drawer" if kind else "drawer")
    folder: Path = request.getfixturevalue(f"{kind}_folder") if kind else FOLDER
    flight = begin(chosen, SMALL_EDIT if name == "small" else SCENARIOS[name] | IMAGE, folder=folder)
    media = dict(flight.media)
    chosen.encode([flight])
    chosen.prepare(flight)
    assert len(flight.branches) == (1 if name == "distil" else 2)
    for _ in range(2):
        flight.media = media
        right = whole_row_velocities(chosen, flight)
        assert torch.allclose(chosen._denoiser([flight])[0], right, atol=1e-5)
        chosen.denoise([flight])


def test_requests_of_any_size_steps_and_guidance_share_calls_and_are_as_alone(drawer: Drawer) -> None:
    asks = [
        SCENARIOS["t2i"] | IMAGE,
        SCENARIOS["t2i_pretrain"] | IMAGE | {"num_inference_steps": 2},
        {"prompt": "a door", "size": "128x512", "guidance_scale": 1.0, "seed": 3, "num_inference_steps": 3} | IMAGE,
        {"prompt": "two doors", "size": "512x128", "guidance_scale": 0.5, "seed": 4, "flow_shift": 1.5} | IMAGE,
        SCENARIOS["t2i"] | IMAGE | {"seed": 43},
        {"prompt": "a", "height": 208, "width": 304, "guidance_scale": 7.0, "seed": 5, "num_inference_steps": 1}
        | IMAGE,
    ]
    together = draw(drawer, [begin(drawer, ask) for ask in asks])
    for ask, mixed in zip(asks, together, strict=True):
        (alone,) = draw(drawer, [begin(drawer, ask)])
        assert np.abs(alone - mixed).max() <= 1e-5
    assert np.abs(together[0] - together[4]).max() > 0.1


def test_prompt_rows_are_computed_once_and_shared_up_to_the_first_difference(drawer: Drawer) -> None:
    flight = begin(drawer, SCENARIOS["t2i"] | IMAGE)
    drawer.encode([flight])
    with_prompt, without = (branch.layout for branch in flight.branches)
    first = without.ids.index(drawer._vocabulary.special.cfg)
    assert flight.counts["prefill_rows"] == with_prompt.prompt + without.prompt - first
    assert [sum(piece.rows for piece in branch.pieces) for branch in flight.branches] == [with_prompt.prompt] * 2


def test_a_failed_call_leaves_every_request_as_it_was(drawer: Drawer, monkeypatch: pytest.MonkeyPatch) -> None:
    flights = [begin(drawer, SCENARIOS["t2i"] | IMAGE | {"seed": seed}) for seed in (1, 2)]
    drawer.encode(flights)
    for flight in flights:
        drawer.prepare(flight)
    before = [(flight.step, flight.ready().latents) for flight in flights]

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(drawer._denoiser, "_velocities", fail)
        with pytest.raises(RuntimeError):
            drawer.denoise(flights)
    assert [(flight.step, flight.ready().latents) for flight in flights] == before


@pytest.mark.slow
def test_numbers_out_of_range_end_a_request_instead_of_a_black_picture(
    small_drawer: Drawer, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = {"prompt": "a", "size": "64x64", "num_inference_steps": 1} | IMAGE
    flight = begin(small_drawer, ask, folder=small_folder)
    draw(small_drawer, [flight])
    monkeypatch.setattr(small_drawer, "_decoder", lambda latents: latents * torch.inf)
    with pytest.raises(StageError, match="pictures that are not finite"):
        small_drawer.decode([flight])


@pytest.mark.slow
def test_pictures_of_one_size_are_decoded_together(small_drawer: Drawer, small_folder: Path) -> None:
    drawer = small_drawer
    ask = {"prompt": "a", "size": "64x64", "num_inference_steps": 1} | IMAGE
    flights = [begin(drawer, ask | {"seed": seed}, folder=small_folder) for seed in (1, 2)]
    draw(drawer, flights)
    assert len({drawer.decode_group(flight) for flight in flights}) == 1
    pictures = [made[0].payload["image"].astype(int) for made in drawer.decode(flights)]
    for flight, picture in zip(flights, pictures, strict=True):
        alone = drawer.decode([flight])[0][0].payload["image"].astype(int)
        assert np.abs(alone - picture).max() <= 1
    assert np.abs(pictures[0] - pictures[1]).max() > 1


def test_previews_come_at_evenly_spaced_steps_and_near_the_picture(drawer: Drawer) -> None:
    ask = SCENARIOS["t2i"] | IMAGE | {"partial_images": 1, "num_inference_steps": 4}
    flight = begin(drawer, ask)
    drawer.encode([flight])
    drawer.prepare(flight)
    due = []
    while drawer.remaining(flight):
        drawer.denoise([flight])
        due.append(drawer.preview(flight) is not None)
    assert due == [False, True, False, False]
    assert flight.expected is not None
    assert torch.allclose(flight.expected, flight.ready().latents, atol=1e-5)  # the last step goes all the way
