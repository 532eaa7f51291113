from __future__ import annotations

import json
from typing import Any

import pytest

from omnistage.config.model import TextMarkup
from omnistage.stages.ar.sections import Sections
from omnistage.tools import MadeCalls, ToolUse, tool_use

THINKS = TextMarkup(tool_format="hermes", reasoning=("<think>", "</think>"))
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\"{", "b": [1, {}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}</tool_call>\\"{", "b": [1, {}]}'


def tools(*, parallel: bool = True) -> ToolUse:
    found = tool_use(TOOLS, "auto", parallel=parallel)
    assert found is not None
    return found


def read(text: str, size: int, use: ToolUse | None = None, prompt: str = "") -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, what is said and calls, of a text that comes in pieces of `size` characters."""
    sections = Sections(THINKS, use)
    sections.follow(prompt)
    pieces = [piece for at in range(0, len(text), size) for piece in sections.push(text[at : at + size])]
    pieces += sections.flush()
    made = MadeCalls("r")
    for piece in pieces:
        made.take(piece.calls)
    thoughts = "".join(piece.text for piece in pieces if piece.reasoning)
    said = "".join(piece.text for piece in pieces if not piece.reasoning)
    return thoughts, said, [(call.name, call.arguments) for call in made.calls]


CASES: list[tuple[str, tuple[str, str, list[tuple[str, str]]]]] = [
    ("Hello <b>there</b>\n", ("", "Hello <b>there</b>\n", [])),
    ("<think>\nhm, <tool_call>\n</think>\n\nSo.", ("hm, <tool_call>", "So.", [])),
    ("<think>never ends", ("never ends", "", [])),
    ("So <think>not a thought</think>", ("", "So <think>not a thought</think>", [])),
    (CALL, ("", "", [("f", ARGUMENTS)])),
    (f"Let me see.\n{CALL}\n{CALL}\n", ("", "Let me see.", [("f", ARGUMENTS)] * 2)),
    (f"<think>\nI call.\n</think>\n\n{CALL}{CALL}", ("I call.", "", [("f", ARGUMENTS)] * 2)),
    ('<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call>', ("", "", [("g", '{"a": 1}')])),
    ('<tool_call>{"name": "g"}</tool_call> done', ("", "done", [("g", "{}")])),
    ('<tool_call>{"name": "g", "arguments": "{\\"a\\": 2}"}</tool_call>', ("", "", [("g", '{"a": 2}')])),
    ('<tool_call>{"name": "f", "arguments": {"a": 1', ("", "", [("f", '{"a": 1')])),
    ('<tool_call>{"name": "other", "arguments": {}}</tool_call>!',
     ("", '<tool_call>{"name": "other", "arguments": {}}</tool_call>!', [])),
    (f"<tool_call>oops</tool_call>{CALL}", ("", "<tool_call>oops</tool_call>", [("f", ARGUMENTS)])),
    ("<tool_call>cut off", ("", "<tool_call>cut off", [])),
    ("I write <tool", ("", "I write <tool", [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES)
@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_sections_are_the_same_however_the_text_is_cut(text: str, expected: Any, size: int) -> None:
    assert read(text, size, tools()) == expected


def test_arguments_are_the_text_that_the_model_wrote() -> None:
    assert json.loads(ARGUMENTS)["a"] == '}</tool_call>"{'


def test_without_tools_their_notation_is_text() -> None:
    assert read(CALL, 4) == ("", CALL, [])


def test_thoughts_that_the_prompt_opened_need_no_tag() -> None:
    assert read("hm\n</think>\nYes", 2, prompt="<|im_start|>assistant\n<think>\n") == ("hm", "Yes", [])


def test_only_one_call_is_taken_when_calls_are_not_parallel() -> None:
    sections = Sections(THINKS, tools(parallel=False))
    pieces = sections.push(CALL + CALL + "more")
    assert [piece.calls[0]["name"] for piece in pieces] == ["f"]
    assert sections.over
    assert sections.flush() == []


def test_arguments_come_as_they_are_written() -> None:
    sections = Sections(THINKS, tools())
    pieces = [sections.push(char) for char in CALL]
    assert sum(len(each) for each in pieces) > len(ARGUMENTS) // 2


def test_text_that_cannot_be_a_tag_is_not_held_back() -> None:
    sections = Sections(THINKS, tools())
    assert [piece.text for piece in sections.push("Hello")] == ["Hello"]
