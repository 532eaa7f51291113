"""Text completions through the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from omnistage.request import OmniRequest, OmniRequestOutput
from tests.entrypoints.http.conftest import Running, Start
from tests.entrypoints.http.fake_engine import FakeEngine, Media, last_event, text_event

MODEL = "fake-model"


async def test_one_prompt(server: Running) -> None:
    answer = await server.client.completions.create(model=MODEL, prompt="Say", max_tokens=5, stop="x")
    assert answer.choices[0].text == "Hello big world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 10
    request = server.engine.requests[0]
    assert (request.task, request.raw_prompt, request.prompt) == ("completion", "Say", None)
    assert request.sampling[""] == {"max_tokens": 5, "stop": ["x"]}


async def test_several_prompts_and_choices_are_ordered_by_prompt(start: Start) -> None:
    async def parrot(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        yield text_event(request, f"{request.raw_prompt}!")
        yield last_event(request, tokens=1)

    server = await start(FakeEngine(parrot))
    answer = await server.client.completions.create(model=MODEL, prompt=["a", "b"], n=2, echo=True)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "aa!"), (1, "aa!"), (2, "bb!"), (3, "bb!")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (14, 4)
    assert len({request.id for request in server.engine.requests}) == 4


async def test_token_prompts(server: Running) -> None:
    await server.client.completions.create(model=MODEL, prompt=[1, 2, 3])
    await server.client.completions.create(model=MODEL, prompt=[[4], [5, 6]])
    ids = [request.params["prompt_token_ids"] for request in server.engine.requests]
    assert ids[0] == [1, 2, 3]
    assert sorted(ids[1:]) == [[4], [5, 6]]


async def test_streamed_completion_has_one_finish_reason_per_choice(server: Running) -> None:
    stream = await server.client.completions.create(
        model=MODEL, prompt="Say", stream=True, n=2, echo=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(c.text for c in mine) == "SayHello big world"
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6


async def test_logprobs_in_the_older_shape(start: Start) -> None:
    async def sure(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        for seq, word in enumerate(["ab", "c"]):
            top = [{"token": word, "logprob": -0.5}, {"token": "z", "logprob": -1.5}]
            yield text_event(request, word, seq, {"logprobs": [{"token": word, "logprob": -0.5, "top_logprobs": top}]})
        yield last_event(request, tokens=2)

    server = await start(FakeEngine(sure))
    answer = await server.client.completions.create(model=MODEL, prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["ab", "c"]
    assert logprobs.text_offset == [0, 2]
    assert logprobs.top_logprobs == [{"ab": -0.5, "z": -1.5}, {"c": -0.5, "z": -1.5}]
    stream = await server.client.completions.create(model=MODEL, prompt="x", logprobs=2, stream=True)
    offsets = [c.logprobs.text_offset async for chunk in stream for c in chunk.choices if c.logprobs]
    assert offsets == [[0], [2]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": [1], "echo": True}, "echo"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": "a", "stream_options": {}}, "stream_options"),
        ({"prompt": "a" * (1 << 18) + "b"}, "prompt"),
    ],
)
async def test_field_at_fault_is_named(server: Running, body: dict, param: str) -> None:
    answer = await server.http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_unknown_model_is_404(server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await server.client.completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
