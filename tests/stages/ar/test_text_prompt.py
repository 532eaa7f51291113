from __future__ import annotations

from typing import Any

import pytest

from omnistage.errors import RequestError
from omnistage.stages.ar.text_prompt import flatten_messages

AUDIO: dict[str, Any] = {"type": "audio", "media": "m0"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_transcripts_take_the_place_of_audio_parts_in_order() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [AUDIO]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": [text("and"), AUDIO, AUDIO]},
    ]
    flat = flatten_messages(messages, ["one", "two", "three"])
    assert [message["content"] for message in flat] == ["one", "yes", "and\ntwo\nthree"]
    assert messages[0]["content"] == [AUDIO]


def test_other_keys_of_a_message_stay() -> None:
    flat = flatten_messages([{"role": "user", "name": "Ann", "content": None}], [])
    assert flat == [{"role": "user", "name": "Ann", "content": ""}]


@pytest.mark.parametrize(
    ("messages", "transcripts", "param"),
    [
        ([], [], "messages"),
        ("hello", [], "messages"),
        (["hello"], [], "messages[0]"),
        ([{"content": "x"}], [], "messages[0]"),
        ([{"role": "user", "content": 3}], [], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], [], "messages[0].content[0]"),
        ([{"role": "user", "content": [text("a"), AUDIO]}], [], "messages[0].content[1]"),
        ([{"role": "user", "content": [{"type": "image", "media": "m"}]}], [], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], [], "messages[0].content[0]"),
        ([{"role": "user", "content": "x"}], ["left over"], "messages"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages: Any, transcripts: list[str], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        flatten_messages(messages, transcripts)
    assert caught.value.info.param == param
