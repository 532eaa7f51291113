"""LangChain's OpenAI chat model, unchanged."""

from __future__ import annotations

import base64
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.servers import Server

langchain_openai = pytest.importorskip("langchain_openai", reason="needs langchain-openai")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default:::pydantic.*", "default:::langchain.*")]

QUESTION = "What is the capital of France?"


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]


@pytest.fixture
def model(chat: Server) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=chat.address + "/v1", api_key="none", model="smol-speech", temperature=0, max_tokens=40, seed=1,
        max_retries=0, stream_usage=True,
    )  # fmt: skip


def test_chat_answers_whole_streamed_and_in_batches(model: Any) -> None:
    answer = model.invoke([("human", QUESTION)])
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"
    pieces = list(model.stream([("human", QUESTION)]))
    assert len(pieces) > 3
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    assert whole.content == answer.content
    assert whole.usage_metadata["total_tokens"] == answer.usage_metadata["total_tokens"]
    # The same prompt again: its whole blocks of 16 tokens are cached, whatever was there the first time.
    cached = whole.usage_metadata["input_token_details"]["cache_read"]
    assert cached == answer.usage_metadata["input_tokens"] // 16 * 16
    both = model.batch([QUESTION, "Say hello."])
    assert all(one.content for one in both)


async def test_chat_answers_asynchronously(model: Any) -> None:
    assert "Paris" in (await model.ainvoke(QUESTION)).content


def test_tools_are_called_and_their_results_go_back(model: Any) -> None:
    asked = model.bind_tools([Weather], tool_choice="required", strict=True, parallel_tool_calls=False).invoke(
        "What is the weather in Rome?"
    )
    (call,) = asked.tool_calls[:1]
    assert call["name"] == "Weather"
    Weather.model_validate(call["args"])
    results = [{"role": "tool", "tool_call_id": made["id"], "content": "sunny"} for made in asked.tool_calls]
    assert model.bind_tools([Weather], tool_choice="none").invoke([("human", "Weather?"), asked, *results]).content


def test_streamed_tool_call_is_the_whole_one(model: Any) -> None:
    bound = model.bind_tools([Weather], tool_choice="required", strict=True, parallel_tool_calls=False)
    question = "What is the weather in Rome?"
    first, *rest = bound.stream(question)
    for piece in rest:
        first = first + piece
    assert [call["args"] for call in first.tool_calls] == [call["args"] for call in bound.invoke(question).tool_calls]
    Weather.model_validate(first.tool_calls[0]["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_of_the_demanded_class(model: Any, method: str) -> None:
    made = model.with_structured_output(Weather, method=method, strict=True).invoke(
        "Which city is the capital of Italy?"
    )
    assert isinstance(made, Weather)


def test_speech_comes_beside_the_text(model: Any) -> None:
    spoken = model.bind(modalities=["text", "audio"], audio={"voice": "heart", "format": "wav"}).invoke(QUESTION)
    assert base64.b64decode(spoken.additional_kwargs["audio"]["data"]).startswith(b"RIFF")
    assert "Paris" in spoken.additional_kwargs["audio"]["transcript"]


def test_errors_are_those_of_the_official_client(model: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt"):
        model.bind(model="gpt").invoke("Hi")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        model.bind(temperature=3.0).invoke("Hi")
