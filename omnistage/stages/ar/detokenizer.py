"""From token ids to streamed text: never half a character, never past a stop string. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is needed here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Incremental decoding of one request's generated tokens; the pieces add up to the decoding of all tokens.

    A replacement character at the end of a text may be a character that is not complete yet, so it is held back. A
    window of tokens is decoded again with each new one: `_begin.._end` have been given out wholly and serve as
    context (a tokenizer may treat the first token of a text specially), later ones wait for the end of a character.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that became certain with `token` (often none)."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        certain = len(text.rstrip(REPLACEMENT))
        delta = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if certain == len(text) and delta:
            self._slide()
        return delta

    def flush(self) -> str:
        """What is left at the end: an unfinished character becomes U+FFFD, as in the decoding of all tokens."""
        text = self._tokenizer.decode(self._ids)
        delta = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return delta

    def _slide(self) -> None:
        """Keeps as context only the tokens that came after the last slide."""
        del self._ids[: self._context]
        self._context = len(self._ids)
        self._shown = len(self._tokenizer.decode(self._ids))


class StopStrings:
    """Cuts a text stream before the first of `stops`; text that may be the beginning of one is `withheld`.

    The stop string that is complete first counts, so the result does not depend on how the text was cut into deltas.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.withheld = ""
        self.found: str | None = None

    def push(self, delta: str) -> str:
        """Text that can be given out now. Once `found` is set the stream is over."""
        if self.found is not None or not self._stops:
            return "" if self.found is not None else delta
        text = self.withheld + delta
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self.found = min(hits)
            self.withheld = ""
            return text[:at]
        keep = max(overlap(text, stop) for stop in self._stops)
        self.withheld = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The withheld text, when the stream ends without a stop string."""
        text, self.withheld = self.withheld, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
