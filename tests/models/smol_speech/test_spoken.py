# ruff: noqa: RUF001 (the look-alike characters of other scripts are meant)
"""What is said for what is written."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.models.smol_speech.phonemes import MAX_PHONEMES, Phonemizer, is_spoken, split_phonemes, to_ipa
from omnistage.models.smol_speech.spoken import spoken_text


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("**Bold** and *fine*", "Bold and fine"),
        ("# Title", "Title"),
        ("- an item", "an item"),
        ("1. First", "1, First"),
        ("`code` here", "code here"),
        ("```python", ""),
        ("> quoted", "quoted"),
        ("---", ""),
        ("[the docs](https://a.com/x)", "the docs"),
        ("![picture](a.png)", "picture"),
        ("[x](/h/) there", "x there"),
        ("see https://www.example.com/a.", "see example dot com slash a."),
        ("mail me@site.org", "mail me at site dot org"),
        ("visit openai.com now", "visit openai dot com now"),
        ("5 * 3 = 15", "5 times 3 = 15"),
        ("5 - 3 = 2", "5 minus 3 = 2"),
        ("pages 5 - 10", "pages 5 - 10"),
        ("it is -5 outside", "it is minus 5 outside"),
        ("a well-known fact", "a well-known fact"),
        ("2^3", "2^3"),
        ("x² and y³", "x² and y³"),
        ("10⁻⁶ m", "10^minus 6 m"),
        ("step ① of ٣", "step 1 of 3"),
        ("1234567890123456", "1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6"),
        ("1,000,000", "1,000,000"),
        ("~5 of them", "about 5 of them"),
        ("x ≤ 4", "x less than or equal to 4"),
        ("great 😀👍🏽 job", "great job"),
        ("20°C", "20°C"),
        ("", ""),
        ("😀", ""),
    ],
)
def test_readings(written: str, spoken: str) -> None:
    assert spoken_text(written) == spoken


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text_gives_one_line(text: str) -> None:
    spoken = spoken_text(text)
    assert "\n" not in spoken
    assert spoken == spoken.strip()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("abcˈ", min_size=1, max_size=30), max_size=40))
def test_phoneme_pieces_keep_every_word_within_the_maximum(words: list[str]) -> None:
    pieces = split_phonemes(" ".join(words), maximum=40)
    assert " ".join(pieces) == " ".join(words)
    assert all(len(piece) <= 40 for piece in pieces)


def test_a_single_word_beyond_the_maximum_stays_whole() -> None:
    word = "a" * (MAX_PHONEMES + 5)
    assert split_phonemes(f"b {word} c") == ["b", word, "c"]


@pytest.mark.parametrize(
    ("phonemes", "spoken"), [("...", False), ("—", False), ("", False), ("ˈ ˌ", False), ("a.", True)]
)
def test_punctuation_alone_is_not_spoken(phonemes: str, spoken: bool) -> None:
    assert is_spoken(phonemes) is spoken


def test_misaki_phonemes_become_espeak_ipa() -> None:
    assert to_ipa("həlˈO wˈɜɹld") == "həlˈoʊ wˈɜːld"
    assert to_ipa("bˈʌTəɹ") == "bˈʌɾɚ"


@pytest.fixture(scope="module")
def phonemizer() -> Phonemizer:
    return Phonemizer()


AWKWARD = st.lists(
    st.sampled_from(
        ["9" * 60, "⁴", "①", "٣", "$", "1,", "'s", "25:99", "2024-13-45", "[a](/b/)", "#", "£3.2m", "’", "Ⅷ", "½", " "]
    )
    | st.characters(codec="utf-8"),
    max_size=8,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=AWKWARD)
def test_no_text_breaks_the_front_end(phonemizer: Phonemizer, text: str) -> None:
    assert all(is_spoken(piece) for piece in phonemizer(text))
