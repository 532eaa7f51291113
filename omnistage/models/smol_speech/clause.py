# ruff: noqa: RUF001 (the look-alike characters of other scripts are meant)
"""Cuts text into clauses for speech while the text is still being written. Torch-free.

The clauses are a function of the whole text alone, however it arrives in pieces, and their concatenation is the text.
White space between two clauses belongs to the later one.
"""

from __future__ import annotations

import msgspec

SENTENCE_MARKS = ".!?…。！？"
# Marks of scripts that put no space behind them.
_WIDE_MARKS = "。！？"
CLAUSE_MARKS = ",;:—"
_CLOSERS = "\"')]}”’»*_"
_TITLES = "mr mrs ms dr prof st mt ft gen gov sen rep capt lt col sgt rev hon pres jr sr"
_SHORTENED = "vs etc approx cf dept univ inc ltd corp co bros ave blvd rd al e.g i.e a.m p.m u.s u.k u.n d.c ph.d"
_NUMBERED = "no nos p pp fig vol ch est ed jan feb mar apr jun jul aug sep sept oct nov dec"
_ABBREVIATIONS = frozenset(f"{_TITLES} {_SHORTENED}".split())
# Abbreviations only in front of a number: "No. 5" but "She said no."
_BEFORE_NUMBER = frozenset(_NUMBERED.split())
# Characters behind a mark that decide whether it ends a clause: closers, white space and the first character after it.
_LOOK_AHEAD = 12


class Clause(msgspec.Struct, frozen=True):
    """A piece of text; `ends_sentence` is False where speech goes on without a full pause."""

    text: str
    ends_sentence: bool


class ClauseRules(msgspec.Struct, frozen=True):
    """When a clause mark may cut, in characters.

    The first clause ends at the first clause mark with a word before it, so that speech starts early. Clause number n
    must have grown to `growth * n` characters, at most `longest_minimum`: speech that has begun leaves time for longer
    clauses, which sound better. Sentence ends always cut; nothing grows beyond `maximum`.
    """

    growth: int = 24
    longest_minimum: int = 72
    maximum: int = 240

    def minimum(self, number: int) -> int:
        return min(self.longest_minimum, self.growth * number)


class ClauseSplitter:
    """Feed text, get the clauses that are certain; `finish` gives the rest."""

    def __init__(self, rules: ClauseRules | None = None) -> None:
        self._rules = rules or ClauseRules()
        self._text = ""
        self._count = 0

    def feed(self, text: str) -> list[Clause]:
        self._text += text
        return self._take(final=False)

    def finish(self) -> list[Clause]:
        clauses = self._take(final=True)
        if self._text:
            clauses.append(Clause(self._text, True))
            self._text = ""
        return clauses

    def _take(self, final: bool) -> list[Clause]:
        clauses: list[Clause] = []
        start = 0
        window = self._rules.maximum + _LOOK_AHEAD + 1
        while True:
            text = self._text[start : start + window]
            is_end = final and start + window >= len(self._text)
            cut = _find_cut(text, is_end, self._rules.minimum(self._count), self._rules.maximum)
            if cut is None:
                break
            clauses.append(Clause(text[: cut[0]], cut[1]))
            start += cut[0]
            self._count += 1
        self._text = self._text[start:]
        return clauses


def _find_cut(text: str, is_end: bool, minimum: int, maximum: int) -> tuple[int, bool] | None:
    """Length of the first clause and whether it ends a sentence; None while undecided or when the text ends first."""
    has_word = False
    for index, character in enumerate(text[:maximum]):
        has_word = has_word or character.isalnum()
        if not has_word or not _may_cut(character):
            continue
        if character in CLAUSE_MARKS and index + 1 < minimum:
            continue
        stop = _cut_at(text, index, is_end)
        if stop is None:
            return None
        if stop:
            return stop, character not in CLAUSE_MARKS
    if len(text) > maximum:
        return _last_space(text, maximum), False
    return None


def _may_cut(character: str) -> bool:
    return character == "\n" or character in SENTENCE_MARKS or character in CLAUSE_MARKS


def _cut_at(text: str, index: int, is_end: bool) -> int | None:
    """Where to cut because of the mark at `index`: 0 for not at all, None when characters to decide are missing."""
    mark = text[index]
    if mark == "\n":
        return index + 1
    stop = _behind_closers(text, index)
    behind = text[stop : index + _LOOK_AHEAD]
    if behind and not behind[0].isspace() and mark not in _WIDE_MARKS:
        return 0
    following = behind.lstrip()
    ends_line = "\n" in behind[: len(behind) - len(following)]
    is_decided = is_end or len(text) >= index + _LOOK_AHEAD
    if not (following or ends_line or is_decided):
        return None
    return stop if _is_boundary(text[: index + 1], mark, "" if ends_line else following) else 0


def _behind_closers(text: str, index: int) -> int:
    """The position behind the mark at `index` and up to three closing quotes or brackets."""
    stop = index + 1
    while stop < len(text) and stop - index <= 3 and text[stop] in _CLOSERS:
        stop += 1
    return stop


def _is_boundary(text: str, mark: str, following: str) -> bool:
    """`text` ends with the mark; `following` starts with the next character on its line that is no space, if any."""
    if mark == ",":
        return not (text[-2:-1].isdigit() and following[:1].isdigit())
    return mark != "." or not (following[:1].islower() or _is_abbreviation(text, following))


def _is_abbreviation(text: str, following: str) -> bool:
    """True when the full stop at the end belongs to an abbreviation, an initial or the number of a list item."""
    words = text[:-1].split()
    word = words[-1].strip("\"'([{“‘*_") if words else ""
    if len(words) == 1 and word.isdigit():
        return True
    is_initial = len(word) == 1 and word.isalpha() and word.isupper() and word != "I"
    is_numbered = following[:1].isdigit() and word.lower() in _BEFORE_NUMBER
    return is_initial or is_numbered or word.lower() in _ABBREVIATIONS


def _last_space(text: str, maximum: int) -> int:
    """The last place to cut before `maximum`: before white space that parts no abbreviation or number from the rest."""
    for index in range(maximum, 0, -1):
        if text[index].isspace() and text[:index].strip() and not _belongs_together(text, index):
            return index
    return maximum


def _belongs_together(text: str, index: int) -> bool:
    before, after = text[:index].rstrip(), text[index:].lstrip()
    is_number = before[-1:] in ",0123456789" and after[:1].isdigit()
    return is_number or (before.endswith(".") and _is_abbreviation(before, after))
