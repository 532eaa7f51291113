"""Pictures over HTTP on toydit: the official client, formats, partial pictures, errors that name the field."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.testing.leakcheck import settled
from tests.engines import answer
from tests.entrypoints.http.real import Running, serving_engine


@pytest.fixture
async def served() -> AsyncIterator[Running]:
    overrides = {"placement": "inline", "stages.dit.step_delay_s": 0.01}
    async with AsyncOmniEngine(resolve_config("toydit", None, overrides)) as engine:
        async with serving_engine(engine) as running:
            yield running
        await settled(engine)


def pixels(data: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


async def test_official_client_gets_the_picture_that_the_engine_makes(served: Running) -> None:
    response = await served.client.images.generate(
        model="toydit", prompt="a red cat", n=2, size="32x48", extra_body={"seed": 3, "num_inference_steps": 4}
    )
    assert len(response.data) == 2
    assert (response.size, response.output_format) == ("32x48", "png")
    expected = await answer(
        served.engine, id="x", task="image", prompt="a red cat", seed=3,
        params={"size": "32x48", "num_inference_steps": 4}, modalities=("image",),
    )  # fmt: skip
    np.testing.assert_array_equal(pixels(response.data[0].b64_json), expected.tensors["image"][0])
    assert response.data[0].b64_json != response.data[1].b64_json


@pytest.mark.parametrize(("name", "kind"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
async def test_output_format_is_honoured(served: Running, name: str, kind: str) -> None:
    response = await served.client.images.generate(model="toydit", prompt="x", output_format=name)
    assert Image.open(io.BytesIO(base64.b64decode(response.data[0].b64_json))).format == kind


async def test_url_is_a_data_url(served: Running) -> None:
    response = await served.client.images.generate(model="toydit", prompt="x", response_format="url")
    assert response.data[0].url.startswith("data:image/png;base64,")


async def test_partial_pictures_come_before_the_whole_one(served: Running) -> None:
    events = []
    stream = await served.client.images.generate(
        model="toydit", prompt="x", stream=True, partial_images=2, extra_body={"num_inference_steps": 12, "seed": 1}
    )
    async for event in stream:
        events.append(event)
    kinds = [event.type for event in events]
    # The first preview finds the decode thread idle; the second gives way when the first takes longer than the steps.
    assert kinds[-1] == "image_generation.completed"
    assert kinds[:-1] in (["image_generation.partial_image"], ["image_generation.partial_image"] * 2)
    assert [event.partial_image_index for event in events[:-1]] == list(range(len(events) - 1))
    assert pixels(events[0].b64_json).shape == pixels(events[-1].b64_json).shape


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": 99}, "n"),
        ({"prompt": "x", "size": "big"}, "size"),
        ({"prompt": "x", "output_format": "gif"}, "output_format"),
        ({"prompt": "x", "background": "transparent"}, "background"),
        ({"prompt": "x", "partial_images": 2}, "partial_images"),
        ({"prompt": "x", "model": "other"}, "model"),
        ({"prompt": "x", "colour": "red"}, "colour"),
        ({"prompt": "x", "params": {"colour": "red"}}, "colour"),
        ({"prompt": "x", "num_inference_steps": 0}, "num_inference_steps"),
        ({"prompt": "x", "stream": True, "n": 2}, "n"),
    ],
)
async def test_bad_field_is_named(served: Running, body: dict[str, Any], param: str) -> None:
    response = await served.http.post("/v1/images/generations", json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


async def test_edits_are_refused_where_the_model_cannot(served: Running) -> None:
    files = {"image": ("a.png", b"x", "image/png")}
    response = await served.http.post("/v1/images/edits", data={"prompt": "x"}, files=files)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/videos"), ("POST", "/v1/videos/sync"), ("POST", "/v1/actions")],
)
async def test_routes_of_other_media_say_that_the_model_does_not_serve_them(
    served: Running, method: str, path: str
) -> None:
    body: dict[str, Any] = {"prompt": "x"} | ({"action": {}} if path.endswith("actions") else {})
    response = await served.http.request(method, path, json=body)
    assert response.status_code == 400
    assert "does not serve" in response.json()["error"]["message"]
