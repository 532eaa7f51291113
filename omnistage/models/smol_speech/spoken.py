# ruff: noqa: RUF001 (the look-alike characters of other scripts are meant)
"""What is said for what is written: readings that the grapheme-to-phoneme front end does not produce. Torch-free.

Numbers, dates, units, currencies and titles are its own business; here come addresses, markup, formulas and pictures.
"""

from __future__ import annotations

import re
import unicodedata

_URL = re.compile(r"(?:https?://|www\.)[^\s<>\"']+", re.IGNORECASE)
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_DOMAIN = re.compile(r"(?<![\w@.])(?:[A-Za-z0-9-]+\.)+(?:com|org|net|io|edu|gov|dev|ai|uk|de|fr|eu)(?![\w])")
_TRAILING = ".,;:!?)]}"
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]*(?:\s+\"[^\"]*\")?\)")
_LINK_REST = re.compile(r"\]\([^)\s]*\)?")
_FENCE = re.compile(r"```\w*")
_HEADING = re.compile(r"(?m)^\s{0,3}#{1,6}\s+")
_BULLET = re.compile(r"(?m)^\s*[-*+•]\s+")
_QUOTE = re.compile(r"(?m)^\s*>\s+")
_LIST_NUMBER = re.compile(r"(?m)^(\s*\d+)[.)]\s+(?=\S)")
_RULE = re.compile(r"(?m)^\s*(?:[-*_=]\s*){3,}$")
_EMPHASIS = re.compile(r"(?<![\w)])(\*{1,3}|__|~~)(?=\S)(.+?)(?<=\S)\1", re.DOTALL)
_ABOUT = re.compile(r"(?<!\S)~(?=\d)")
_OPERAND = r"[\w)²³]"
_TIMES = re.compile(rf"(?<={_OPERAND})\s*[*⋅·]\s*(?=[\w(])")
_MINUS = re.compile(r"(?<=[\d)])\s+[-−–]\s+(?=[\d(])")
_NEGATIVE = re.compile(r"(?<![\w)])[-−](?=\d)")
_FORMULA_MARK = re.compile(r"[=*+/×÷<>≤≥^]")
_WORDS = {
    "≤": "less than or equal to",
    "≥": "greater than or equal to",
    "≠": "not equal to",
    "≈": "approximately",
    "√": "the square root of",
    "∞": "infinity",
    "π": "pi",
    "∑": "the sum of",
    "∫": "the integral of",
    "∂": "partial",
    "Δ": "delta",
    "⁄": "over",
}
_EXPONENT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_READ_EXPONENTS = ("²", "³")
_READ_NUMBERS = "²³½¼¾"
# The front end names numbers up to 36 digits; beyond 15 nobody follows.
_LONG_NUMBER = re.compile(r"\d(?:,?\d){15,}")
_ADDRESS_WORDS = {
    ".": "dot",
    "/": "slash",
    "@": "at",
    "-": "dash",
    "_": "underscore",
    "?": "question mark",
    "=": "equals",
    "&": "and",
    "#": "hash",
    ":": "colon",
    "%": "percent",
    "+": "plus",
    "~": "tilde",
}
_SPACE = re.compile(r"[ \t\r\f\v\u00a0\n]+")


def spoken_text(text: str) -> str:
    """One line of plain text for the front end; "" when nothing of `text` is said."""
    text = _plain_numbers(unicodedata.normalize("NFC", text))
    text = _strip_markup(text)
    text = _URL.sub(_say_url, text)
    text = _EMAIL.sub(lambda match: _say_address(match[0]), text)
    text = _DOMAIN.sub(lambda match: _say_address(match[0]), text)
    text = _say_formulas(text)
    text = "".join(character for character in text if not _is_picture(character))
    return _SPACE.sub(" ", text).strip()


def _plain_numbers(text: str) -> str:
    """Digits of every kind as 0 to 9, exponents behind "^", and numbers too long to be named digit by digit."""
    text = _EXPONENT.sub(_exponent, text)
    text = "".join(map(_plain_number, text))
    return _LONG_NUMBER.sub(lambda match: " ".join(match[0].replace(",", "")), text)


def _exponent(match: re.Match[str]) -> str:
    digits = match[0]
    return digits if digits in _READ_EXPONENTS else "^" + unicodedata.normalize("NFKC", digits).replace("−", "-")


def _plain_number(character: str) -> str:
    if character.isascii() or character in _READ_NUMBERS:
        return character
    if unicodedata.category(character) in ("Nd", "No"):
        return unicodedata.normalize("NFKC", str(unicodedata.digit(character, character)))
    return character


def _strip_markup(text: str) -> str:
    text = _LINK.sub(r"\1", text)
    text = _LINK_REST.sub(" ", text).replace("[", " ").replace("]", " ")
    text = _FENCE.sub(" ", text).replace("`", "")
    text = _RULE.sub(" ", text)
    text = _HEADING.sub("", text)
    text = _QUOTE.sub("", text)
    text = _BULLET.sub("", text)
    text = _LIST_NUMBER.sub(r"\1, ", text)
    for _ in range(2):
        text = _EMPHASIS.sub(r"\2", text)
    return text


def _say_url(match: re.Match[str]) -> str:
    url = match[0]
    kept = url.rstrip(_TRAILING)
    address = re.sub(r"(?i)^(?:https?://)?(?:www\.)?", "", kept).rstrip("/")
    return _say_address(address) + url[len(kept) :]


def _say_address(address: str) -> str:
    words = [f" {_ADDRESS_WORDS[c]} " if c in _ADDRESS_WORDS else c for c in address]
    return _SPACE.sub(" ", "".join(words)).strip()


def _say_formulas(text: str) -> str:
    text = _ABOUT.sub("about ", _TIMES.sub(" times ", text))
    if _FORMULA_MARK.search(text):
        text = _MINUS.sub(" minus ", text)
    text = _NEGATIVE.sub("minus ", text)
    for sign, words in _WORDS.items():
        text = text.replace(sign, f" {words} ")
    return text.replace("**", " ").replace("*", " ")


def _is_picture(character: str) -> bool:
    """Emoji and other symbols without a reading, joiners, variation selectors and control characters."""
    category = unicodedata.category(character)
    if category == "So":
        return character not in "©®™°"
    if category == "Sk":
        return not character.isascii()
    return category in ("Cf", "Cs", "Co", "Cn", "Me") or "\ufe00" <= character <= "\ufe0f"
