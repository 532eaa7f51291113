"""From a client's request to ports and parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omnistage.errors import RequestError
from omnistage.models.minimax_h3.pipeline import PIPELINE, plan
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from tests.models.minimax_h3 import tiny
from tests.models.minimax_h3.harness import ASKS, submission


class _Config:
    def __init__(self, variant: str) -> None:
        self.variant = variant


def route(request: OmniRequest, media: dict[str, MultimodalPayload], variant: str = "default") -> Any:
    return plan(request, media, _Config(variant))  # type: ignore[arg-type]


def test_media_become_tensors_by_role_and_shapes_in_the_parameters() -> None:
    made = route(*submission("a", 1, ASKS["mixed"]))
    (item,) = made.inputs
    assert item.port == "media"
    assert set(item.payload.tensors) == {f"reference.{i}" for i in range(4)} | {"reference.1.sound"}
    first, second, third, fourth = made.params["diffusion"]["references"]
    assert (first["kind"], first["shape"], first["sample_rate"]) == ("audio", (1, 5600), tiny.RATE)
    assert (second["fps"], second["sound"]) == (15.0, (2, 8000))
    assert third == {"kind": "image", "shape": (64, 64, 3)}
    assert fourth["fps"] == 24.0


def test_clip_keeps_the_rate_of_its_file_unless_the_request_says_otherwise() -> None:
    media = {"v": MultimodalPayload.of({"fps": 30.0}, video=tiny.clip(1, 20))}
    for given, right in (({}, 30.0), ({"fps": 12}, 12)):
        request = OmniRequest(id="a", prompt="p", params={"references": [{"video": {"media": "v"}} | given]})
        assert route(request, media).params["diffusion"]["references"][0]["fps"] == right


def test_picture_with_a_leading_axis_of_one_is_taken() -> None:
    media = {"i": MultimodalPayload.of({}, image=tiny.picture(1, 64, 64)[None])}
    request = OmniRequest(id="a", prompt="p", params={"image": {"media": "i"}})
    assert route(request, media).params["diffusion"]["media_shapes"] == {"image": (64, 64, 3)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"raw_prompt": "q"}, "prompt"),
        ({"prompt": None, "messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"prompt": None, "messages": [{"role": "user", "content": [{"type": "image", "media": "i"}]}]}, "messages"),
        ({"modalities": ("image",)}, "modalities"),
        ({"voice": "joe"}, "voice"),
        ({"params": {"image": {"media": "nowhere"}}}, "image"),
        ({"params": {"image": "i"}}, "image"),
        ({"params": {"image": {"media": "s"}}}, "image"),
        ({"params": {"references": []}}, "references"),
        ({"params": {"references": ["i"]}}, "references"),
        ({"params": {"references": [{"image": {"media": "i"}, "fps": 3}]}}, "references"),
        ({"params": {"references": [{"sound": {"media": "s"}}]}}, "references"),
        ({"params": {"media_shapes": {}}}, "media_shapes"),
        ({"params": {"image": {"media": "i"}}}, "s"),
    ],
)
def test_request_that_cannot_run_names_the_field(fields: dict[str, Any], param: str) -> None:
    media = {
        "i": MultimodalPayload.of({}, image=tiny.picture(1, 64, 64)),
        "s": MultimodalPayload.of({"sample_rate": 8000}, audio=tiny.sound(1, 0.1, 1)),
    }
    with pytest.raises(RequestError) as caught:
        route(OmniRequest(**({"id": "a", "prompt": "p"} | fields)), media)
    assert caught.value.info.param == param


@pytest.mark.parametrize(
    "array", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32), np.zeros((0, 4, 3), np.uint8)]
)
def test_array_of_another_kind_is_no_picture(array: np.ndarray) -> None:
    media = {"i": MultimodalPayload.of({}, image=array)}
    with pytest.raises(RequestError, match="no image"):
        route(OmniRequest(id="a", prompt="p", params={"image": {"media": "i"}}), media)


def test_message_of_one_user_is_the_prompt_verbatim() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "fox"}]}
    assert route(OmniRequest(id="a", messages=[message]), {}).params["diffusion"]["prompt"] == "a fox"


def test_split_variant_gives_noise_to_the_middle_stage_and_media_to_the_first() -> None:
    request, media = submission("a", 1, ASKS["first"] | {"latents": np.zeros((1, 6, 37, 2, 4), np.float32)})
    made = route(request, media, "split")
    assert made.stages == ("encoder", "diffusion", "decoder")
    assert {item.port: set(item.payload.tensors) for item in made.inputs} == {"media": {"image"}, "noise": {"latents"}}


def test_declaration_is_torch_free_and_names_its_architecture() -> None:
    assert "MiniMaxH3ModularPipeline" in PIPELINE.architectures
    assert set(PIPELINE.variants) == {"default", "split"}
