from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from omnistage.stages.ar.detokenizer import REPLACEMENT, Detokenizer, StopStrings
from tests.stages.ar.conftest import make_tokenizer, token_id

TOKENIZER = make_tokenizer()
TEXTS = ["naïve café", "日本語 🎉 text", "👩‍👩‍👧 family", "plain", "a\n\nb  c", "ünïcode … “quotes”"]


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_text_and_hold_no_half_character(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    streamed = pieces(TOKENIZER, ids)
    assert "".join(streamed) == text
    assert not any(REPLACEMENT in piece for piece in streamed)


def test_a_character_comes_with_its_last_byte() -> None:
    single = [token_id(TOKENIZER, piece) for piece in "ðŁİī"]  # the four bytes of U+1F389
    assert pieces(TOKENIZER, single) == ["", "", "", "🎉", ""]


def test_an_unfinished_character_is_shown_as_such_at_the_end_only() -> None:
    ids = TOKENIZER.encode("ok 🎉").ids[:-1]
    streamed = pieces(TOKENIZER, ids)
    assert not any(REPLACEMENT in piece for piece in streamed[:-1])
    assert "".join(streamed) == TOKENIZER.decode(ids)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=60))
def test_any_tokens_stream_to_what_decoding_them_at_once_gives(ids: list[int]) -> None:
    assert "".join(pieces(TOKENIZER, ids)) == TOKENIZER.decode(ids)


def test_special_tokens_are_not_text() -> None:
    end = token_id(TOKENIZER, "<|im_end|>")
    ids = [*TOKENIZER.encode("one").ids, end, *TOKENIZER.encode(" two").ids]
    assert "".join(pieces(TOKENIZER, ids)) == "one two"


def test_only_the_first_word_loses_the_space_that_a_metaspace_decoder_strips() -> None:
    tokenizer = Tokenizer(models.WordLevel({"\u2581one": 0, "\u2581two": 1, "\u2581three": 2}, unk_token="\u2581one"))
    tokenizer.decoder = decoders.Metaspace()
    assert pieces(tokenizer, [0, 1, 2]) == ["one", " two", " three", ""]


def test_byte_fallback_tokens_never_show_replacements_before_the_end() -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"x": 256}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="x"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert "".join(pieces(tokenizer, list("€€😀é".encode()))) == "€€😀é"


def test_the_window_stays_small_over_a_long_text() -> None:
    seen: list[int] = []

    class Spy:
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            seen.append(len(ids))
            return str(TOKENIZER.decode(list(ids), skip_special_tokens=skip_special_tokens))

    detokenizer = Detokenizer(Spy())
    for token in TOKENIZER.encode("the quick brown fox 🎉 " * 50).ids:
        detokenizer.push(token)
    assert max(seen) <= 12


def stream(stops: list[str], deltas: list[str]) -> tuple[list[str], str | None]:
    checker = StopStrings(stops)
    out = [checker.push(delta) for delta in deltas]
    if checker.found is None:
        out.append(checker.flush())
    return out, checker.found


@pytest.mark.parametrize(
    ("stops", "deltas", "shown", "found"),
    [
        (["END"], ["abc", "E", "N", "D", "x"], ["abc", "", "", "", ""], "END"),
        (["END"], ["abE", "NoEN"], ["ab", "ENo", "EN"], None),
        (["END"], ["abENDcd"], ["ab"], "END"),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
        (["abc", "b"], ["ab", "c"], ["a", ""], "b"),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
        (["xyz", "yq"], ["xy", "q"], ["", "x"], "yq"),
        ([], ["a", "b"], ["a", "b", ""], None),
    ],
)
def test_text_is_withheld_while_it_may_begin_a_stop_string(
    stops: list[str], deltas: list[str], shown: list[str], found: str | None
) -> None:
    assert stream(stops, deltas) == (shown, found)


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 20), max_size=6),
)
def test_the_result_does_not_depend_on_where_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    deltas = [text[begin:end] for begin, end in pairwise(edges)]
    out, found = stream(stops, deltas)
    whole, whole_found = stream(stops, [text])
    assert ("".join(out), found) == ("".join(whole), whole_found)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert (found is None) == (not ends)
    if not ends:
        assert "".join(out) == text
