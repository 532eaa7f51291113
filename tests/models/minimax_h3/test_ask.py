"""Every rule of the request's parameters, each error naming its parameter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omnistage.errors import RequestError
from omnistage.models.minimax_h3.ask import Ask, resolve
from omnistage.models.minimax_h3.checkpoint import Checkpoint

PUBLISHED = Checkpoint(
    folder=Path(), partitions=("transformer", "transformer_ref"), canvas_short_edge=768, canvas_max_pixels=768 * 1344,
    reference_short_edge=2048, channels=24, audio_channels=32, patch=(1, 2, 2), spatial=16, clip_frames=17,
    clip_latents=5, sample_rate=32000, hop=800, flow_shift=12.0, audio_flow_shift=3.0,
)  # fmt: skip
IMAGE = {"kind": "image", "shape": [96, 64, 3]}
CLIP = {"kind": "video", "shape": [30, 32, 64, 3], "fps": 15.0}
SOUND = {"kind": "audio", "shape": [1, 8000], "sample_rate": 8000}


def ask(max_pixels: int = 1 << 22, **params: Any) -> Ask:
    return resolve({"prompt": "p"} | params, PUBLISHED, max_pixels)


def test_defaults_are_those_of_the_published_model() -> None:
    made = ask()
    assert (made.task, made.height, made.width, made.frames, made.steps) == ("t2va", 768, 1344, 124, 50)
    assert (made.latent_frames, made.latent_height, made.latent_width, made.audio_latents) == (37, 48, 84, 207)
    assert (made.flow_shift, made.audio_flow_shift, made.partition) == (12.0, 3.0, "transformer")


def test_canvas_follows_the_first_keyframe() -> None:
    made = ask(media_shapes={"last_image": [1000, 500, 3]})
    assert (made.task, made.anchors) == ("fl2va", ("last",))
    assert made.height > made.width
    both = ask(media_shapes={"last_image": [1000, 500, 3], "image": [500, 1000, 3]})
    assert both.anchors == ("first", "last")
    assert both.height < both.width


def test_references_choose_their_task_and_transformer() -> None:
    made = ask(references=[IMAGE, SOUND], num_frames=124)
    assert (made.task, made.partition) == ("ref2va", "transformer_ref")


def test_size_may_be_written_as_one_word() -> None:
    assert (ask(size="640x320").width, ask(size="640x320").height) == (640, 320)
    assert ask(size="auto").width == 1344


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a <|image_pad|>"}, "prompt"),
        ({"height": 320}, "width"),
        ({"width": 320}, "height"),
        ({"height": 330, "width": 320}, "height"),
        ({"height": 320, "width": 328}, "width"),
        ({"height": 4096, "width": 4096}, "height"),
        ({"size": "640"}, "size"),
        ({"size": "640x320", "width": 640, "height": 320}, "size"),
        ({"size": "0x320"}, "size"),
        ({"num_frames": 107}, "num_frames"),
        ({"num_frames": 346}, "num_frames"),
        ({"num_frames": 0}, "num_frames"),
        ({"num_inference_steps": 1}, "num_inference_steps"),
        ({"num_inference_steps": 2.5}, "num_inference_steps"),
        ({"flow_shift": 0}, "flow_shift"),
        ({"audio_flow_shift": -1}, "audio_flow_shift"),
        ({"guidance_scale": 2}, "guidance_scale"),
        ({"negative_prompt": "x"}, "negative_prompt"),
        ({"task": "fl2va"}, "task"),
        ({"task": "t2va", "media_shapes": {"image": [64, 64, 3]}}, "task"),
        ({"task": "nonsense"}, "task"),
        ({"media_shapes": {"image": [64, 400, 3]}}, "image"),
        ({"references": [IMAGE]}, "num_frames"),
        ({"references": [SOUND], "num_frames": 124}, "references"),
        ({"references": [IMAGE] * 10, "num_frames": 124}, "references"),
        ({"references": [CLIP] * 4, "num_frames": 124}, "references"),
        ({"references": [IMAGE] * 7 + [CLIP] * 3 + [SOUND] * 3, "num_frames": 124}, "references"),
        ({"references": [CLIP | {"shape": [5, 32, 64, 3]}], "num_frames": 124}, "references"),
        ({"references": [IMAGE | {"shape": [10, 100, 3]}], "num_frames": 124}, "references"),
        ({"references": [IMAGE, SOUND | {"shape": [6, 800]}], "num_frames": 124}, "references"),
        ({"references": [IMAGE], "media_shapes": {"image": [64, 64, 3]}}, "references"),
        ({"media_shapes": {"latents": [1, 24, 37, 48, 83]}}, "latents"),
        ({"media_shapes": {"audio_latents": [2, 32, 206]}}, "audio_latents"),
    ],
)
def test_bad_parameter_names_itself(params: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ask(**params)
    assert str(caught.value.info.param).split("[")[0] == param


@pytest.mark.parametrize(("frames", "right"), [(108, 124), (124, 124), (125, 141), (345, 345)])
def test_frames_are_rounded_up(frames: int, right: int) -> None:
    assert ask(num_frames=frames).frames == right


def test_task_of_a_transformer_that_is_not_served_is_refused() -> None:
    with pytest.raises(RequestError, match="transformer_ref"):
        resolve(
            {"prompt": "p", "references": [IMAGE], "num_frames": 124},
            replace(PUBLISHED, partitions=("transformer",)),
            1 << 22,
        )
