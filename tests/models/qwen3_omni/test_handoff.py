from __future__ import annotations

import pytest
import torch

from omnistage.errors import RequestError
from omnistage.models.qwen3_omni import pipeline
from omnistage.models.qwen3_omni.encoders import Medium
from omnistage.models.qwen3_omni.handoff import SpokenTokens, TokenRoles, speech_of
from omnistage.models.qwen3_omni.positions import Positions
from omnistage.models.qwen3_omni.prompt import ThinkerPrompt
from omnistage.stages.ar.sections import Sections
from omnistage.tools import tool_use

START, END, USER, ASSISTANT, SYSTEM, NEWLINE = 1, 2, 3, 4, 5, 6
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ROLES = TokenRoles(START, USER, ASSISTANT)


def turn(role: int, *content: int) -> list[int]:
    return [START, role, NEWLINE, *content, END, NEWLINE]


def prompt(ids: list[int], *media: Medium) -> ThinkerPrompt:
    return ThinkerPrompt(ids, Positions.plain(len(ids)), media)


def picture(start: int, count: int, grid: tuple[int, int, int]) -> Medium:
    return Medium("image", torch.arange(start, start + count), torch.zeros(1), b"", grid=grid)


def test_only_user_turns_reach_the_talker() -> None:
    ids = [*turn(SYSTEM, 10), *turn(USER, 20, 21), *turn(ASSISTANT, 30), *turn(USER, 40), START, ASSISTANT, NEWLINE]
    speech = speech_of(prompt(ids), ROLES)
    assert speech.prompt.ids == [*turn(USER, 20, 21), *turn(USER, 40)]
    assert speech.prompt.head == [START, ASSISTANT, NEWLINE]
    assert speech.written == []


def test_a_picture_in_a_dropped_turn_shifts_no_later_grid() -> None:
    ids = [*turn(SYSTEM, 10, 10), *turn(USER, 10, 10, 10), START, ASSISTANT, NEWLINE]
    speech = speech_of(prompt(ids, picture(3, 2, (1, 2, 4)), picture(10, 3, (1, 2, 6))), ROLES)
    assert speech.prompt.image_grids == [[1, 2, 6]]
    assert speech.rows == [10, 11, 12]
    assert speech.prompt.places == [3, 4, 5]


def test_a_prompt_without_user_turn_has_an_opening_only() -> None:
    speech = speech_of(prompt([*turn(SYSTEM, 10), START, ASSISTANT, NEWLINE]), ROLES)
    assert speech.prompt.ids == []
    assert speech.prompt.head == [START, ASSISTANT, NEWLINE]


def test_an_answer_that_the_prompt_begins_is_spoken() -> None:
    speech = speech_of(prompt([*turn(USER, 20), START, ASSISTANT, NEWLINE, 70, 71]), ROLES)
    assert speech.written == [70, 71]


@pytest.mark.parametrize("ids", [turn(USER, 20), [*turn(USER, 20), START, ASSISTANT], [20, 21]], ids=str)
def test_speech_needs_a_prompt_that_opens_an_answer(ids: list[int]) -> None:
    with pytest.raises(RequestError, match="assistant turn") as error:
        speech_of(prompt(ids), ROLES)
    assert error.value.info.param == "raw_prompt"


def test_the_last_token_is_not_spoken() -> None:
    spoken = SpokenTokens()
    told = [spoken.push(token, last=False, withheld=False, unsaid=False) for token in (7, 8)]
    told.append(spoken.push(9, last=True, withheld=False, unsaid=False))
    assert told == [[7], [8], []]


def test_tokens_of_a_possible_stop_string_wait_and_are_dropped_by_it() -> None:
    spoken = SpokenTokens()
    assert spoken.push(7, last=False, withheld=False, unsaid=False) == [7]
    assert spoken.push(8, last=False, withheld=True, unsaid=False) == []
    assert spoken.push(9, last=True, withheld=False, unsaid=True) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I look.\n" + CALL, "I look."),
        (f"\n{CALL}\n{CALL}\nDone.\nBye", "Done.\nBye"),
        ("<think>hm</think>Yes <b>", "Yes <b>"),
        ("<tool_call>no call</tool_call>.", "<tool_call>no call</tool_call>."),
        (CALL[:-20], ""),
        (CALL[:12], CALL[:12]),
        ("<think>hm</th", ""),
    ],
)
def test_thoughts_and_calls_are_not_spoken(text: str, expected: str) -> None:
    use = tool_use([{"type": "function", "function": {"name": "f"}}], "auto", parallel=True)
    sections = Sections(pipeline.PIPELINE.variants["default"].stages[0].markup, use)
    spoken = SpokenTokens()
    told = list[int]()
    for char in text:
        sections.push(char)
        told += spoken.push(ord(char), last=False, withheld=sections.uncertain, unsaid=sections.unsaid)
    sections.flush()
    told += spoken.push(0, last=True, withheld=False, unsaid=sections.unsaid)
    assert "".join(map(chr, told)) == expected


def test_tokens_of_no_stop_string_are_spoken_after_all() -> None:
    spoken = SpokenTokens()
    assert spoken.push(7, last=False, withheld=True, unsaid=False) == []
    assert spoken.push(8, last=False, withheld=False, unsaid=False) == [7, 8]


def test_withheld_tokens_are_spoken_when_the_text_ends_otherwise() -> None:
    spoken = SpokenTokens()
    spoken.push(7, last=False, withheld=True, unsaid=False)
    assert spoken.push(8, last=True, withheld=False, unsaid=False) == [7]
