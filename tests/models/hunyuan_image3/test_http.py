"""The family over HTTP with the official client: pictures, edits, chat that thinks and draws."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.payload import Array
from omnistage.testing.leakcheck import settled
from tests.entrypoints.http.real import Running, serving_engine
from tests.models.hunyuan_image3.harness import SMALL_EDIT, answer, overrides, pictures

pytestmark = pytest.mark.slow
COT = {"seed": 42, "bot_task": "think_recaption"}
ASK = COT | {"prompt": "a blue door", "size": "auto"}
SAID = [{"role": "user", "content": "a blue door"}]


@pytest.fixture
async def served(small_folder: Path) -> AsyncIterator[Running]:
    settings = overrides("ar_dit", placement="inline", served_name="hunyuan")
    async with AsyncOmniEngine(resolve_config(str(small_folder), None, settings)) as engine:
        async with serving_engine(engine) as running:
            yield running
        await settled(engine)


def pixels(data: str) -> Array:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data.removeprefix("data:image/png;base64,")))))


def png(picture: Array) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


async def test_a_picture_with_its_thoughts_as_the_revised_prompt(served: Running) -> None:
    made = await served.client.images.generate(model="hunyuan", prompt="a blue door", size="auto", extra_body=COT)
    expected = await answer(served.engine, "x", ASK, ("image", "text"))
    np.testing.assert_array_equal(pixels(made.data[0].b64_json), expected.tensors["image"][0])
    height, width = expected.tensors["image"].shape[1:3]
    assert made.size == f"{width}x{height}"
    assert made.data[0].revised_prompt == expected.text
    assert expected.reasoning


async def test_edits_take_several_pictures(served: Running) -> None:
    images = [("s.png", png(pictures()["s"]), "image/png"), ("q.png", png(pictures()["q"]), "image/png")]
    fields = {"bot_task": "image", "num_inference_steps": 1, "seed": 42, "params": {"system_prompt": "You draw."}}
    made = await served.client.images.edit(
        model="hunyuan", image=images, prompt="a red cat", size="64x64",
        extra_body={key: str(value).replace("'", '"') for key, value in fields.items()},
    )  # fmt: skip
    ask = SMALL_EDIT | {"num_inference_steps": 1}
    expected = await answer(served.engine, "x", ask, ("image",))
    np.testing.assert_array_equal(pixels(made.data[0].b64_json), expected.tensors["image"][0])


async def test_chat_answers_with_reasoning_text_and_picture(served: Running) -> None:
    made = await served.client.chat.completions.create(
        model="hunyuan", messages=SAID, modalities=["text", "image"], extra_body=COT
    )
    message = made.choices[0].message
    expected = await answer(served.engine, "x", ASK, ("image", "text"))
    assert (message.reasoning_content, message.content) == (expected.reasoning, expected.text)
    assert message.reasoning_content
    np.testing.assert_array_equal(pixels(message.images[0]["image_url"]["url"]), expected.tensors["image"][0])


async def test_streamed_chat_gives_reasoning_then_text_then_the_picture(served: Running) -> None:
    kinds: list[str] = []
    stream = await served.client.chat.completions.create(
        model="hunyuan", messages=SAID, modalities=["text", "image"], stream=True, extra_body=COT
    )
    async for chunk in stream:
        delta: Any = chunk.choices[0].delta.model_dump(exclude_none=True)
        kinds += [kind for kind in ("reasoning_content", "content", "images") if delta.get(kind)]
    assert list(dict.fromkeys(kinds)) == ["reasoning_content", "content", "images"]


async def test_chat_about_a_picture(served: Running) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(pictures()["s"])).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a red cat"}]
    said = [{"role": "system", "content": "You draw."}, {"role": "user", "content": content}]
    made = await served.client.chat.completions.create(
        model="hunyuan", messages=said, seed=42, max_tokens=9, extra_body={"bot_task": "think"}
    )
    ask = SMALL_EDIT | {"images": ["s"], "bot_task": "think", "sampling": {"ar": {"max_tokens": 9}}}
    expected = await answer(served.engine, "x", ask, ("text",), task="chat")
    assert made.choices[0].message.reasoning_content == expected.reasoning
    assert made.choices[0].finish_reason == expected.finish_reason
    assert made.usage.completion_tokens == len(expected.token_ids)
    assert made.usage.prompt_tokens > 260


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"modalities": ["audio"]}, "modalities"),
        ({"bot_task": "dream"}, "bot_task"),
        ({"modalities": ["image"], "size": "big"}, "size"),
        ({"params": {"size": "64x64"}}, "params.size"),
        ({"params": {"negative_prompt": "x"}}, "negative_prompt"),
    ],
)
async def test_bad_fields_are_named(served: Running, body: dict[str, Any], param: str) -> None:
    response = await served.http.post("/v1/chat/completions", json={"messages": SAID} | body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
