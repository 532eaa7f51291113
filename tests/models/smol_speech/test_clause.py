"""The clause splitter: where it cuts, where it must not, and that the way text arrives does not matter."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.models.smol_speech.clause import Clause, ClauseRules, ClauseSplitter

WORDS = ["Hello", "Dr", "e.g", "3.14", "1,000", "https://a.com/x,y;z", "no", "I", "U.S", "moon", "日本", "😀", "a" * 90]
MARKS = [".", ",", "!", "?", ";", ":", "...", '."', ".)", "\n", "\n\n", " ", "  ", " \n ", "—", "。", "", "  " * 9]
text_strategy = st.lists(st.sampled_from(WORDS + MARKS), max_size=60).map("".join) | st.text(max_size=200)


def split(text: str, rules: ClauseRules | None = None) -> list[Clause]:
    splitter = ClauseSplitter(rules)
    return splitter.feed(text) + splitter.finish()


def texts(text: str, rules: ClauseRules | None = None) -> list[str]:
    return [clause.text for clause in split(text, rules)]


EVERY_MARK = ClauseRules(growth=0)


@settings(max_examples=300, deadline=None)
@given(text=text_strategy)
def test_clauses_together_are_the_text(text: str) -> None:
    assert "".join(texts(text)) == text


@settings(max_examples=300, deadline=None)
@given(text=text_strategy, cuts=st.lists(st.integers(0, 300), max_size=30))
def test_clauses_do_not_depend_on_how_the_text_arrives(text: str, cuts: list[int]) -> None:
    splitter = ClauseSplitter()
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    clauses: list[Clause] = []
    for start, stop in itertools.pairwise(borders):
        clauses += splitter.feed(text[start:stop])
    assert clauses + splitter.finish() == split(text)


@settings(max_examples=200, deadline=None)
@given(text=text_strategy, maximum=st.integers(16, 60))
def test_no_clause_is_longer_than_the_maximum(text: str, maximum: int) -> None:
    for clause in texts(text, ClauseRules(maximum=maximum)):
        assert 0 < len(clause) <= maximum + 4


def test_the_first_clause_ends_at_the_first_comma() -> None:
    assert texts("Yes, I can do that.")[0] == "Yes,"


def test_a_clause_is_known_as_soon_as_the_space_behind_its_mark() -> None:
    splitter = ClauseSplitter()
    assert splitter.feed("Well,") == []
    assert splitter.feed(" ") == []
    assert splitter.feed("I") == [Clause("Well,", False)]


def test_later_clauses_must_grow_before_a_comma_cuts() -> None:
    text = "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen."
    lengths = [len(clause) for clause in texts(text)]
    assert lengths[0] == 4
    assert lengths[1] >= 24
    assert lengths[2] >= 48


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("He left. She stayed.", ["He left.", " She stayed."]),
        ("Really? Yes! Good.", ["Really?", " Yes!", " Good."]),
        ('She said "go." Then he went.', ['She said "go."', " Then he went."]),
        ("First line\nSecond line", ["First line\n", "Second line"]),
        ("One; two: three", ["One;", " two:", " three"]),
        ("It was 1999. Then came 2000.", ["It was 1999.", " Then came 2000."]),
        ("The answer is no. Then he left.", ["The answer is no.", " Then he left."]),
        ("Wait... what now? Right.", ["Wait... what now?", " Right."]),
        ("そうです。はい。", ["そうです。", "はい。"]),
    ],
)
def test_it_cuts_here(text: str, expected: list[str]) -> None:
    assert texts(text, EVERY_MARK) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Pi is 3.14159 exactly",
        "It costs $1,250.99 today",
        "Dr. Smith met J. K. Rowling",
        "the U.S. Navy",
        "See No. 5 and Fig. 3",
        "Look at https://example.com/a,b;c:d.e?f now",
        "Mail a.b@c.org today",
        "At 10:30 on January 5, 2024",
        "some fruit, e.g. apples".replace(",", ""),
        "1. First of all",
        "version 2.0.1 is out",
        "approx. ten people",
    ],
)
def test_it_never_cuts_inside_numbers_abbreviations_and_addresses(text: str) -> None:
    assert texts(text, EVERY_MARK) == [text]


def test_marks_without_words_do_not_make_clauses() -> None:
    assert texts("... !!! Hello. ...", EVERY_MARK) == ["... !!! Hello.", " ..."]


def test_a_long_clause_is_cut_before_a_space() -> None:
    clauses = texts("word " * 100, ClauseRules(maximum=50))
    assert all(clause.strip().endswith("word") for clause in clauses if clause.strip())


def test_sentence_ends_are_told_from_joins() -> None:
    assert [clause.ends_sentence for clause in split("Yes, it is. Good", EVERY_MARK)] == [False, True, True]


@pytest.mark.parametrize("text", ["", "a", "Hi.", "\n"])
def test_texts_of_nothing_or_one_token(text: str) -> None:
    assert texts(text) == ([text] if text else [])


def test_the_splitter_keeps_only_the_open_clause() -> None:
    splitter = ClauseSplitter()
    for _ in range(1000):
        splitter.feed("This is one more sentence. ")
    assert len(splitter._text) < 300
