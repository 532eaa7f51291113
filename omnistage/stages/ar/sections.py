"""Cuts a model's text, as it comes, into what it thinks, what it says and the tools it calls. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from omnistage.config.model import TextMarkup
from omnistage.stages.ar.detokenizer import overlap
from omnistage.stages.ar.hermes import CallDelta, Hermes, HermesReader
from omnistage.tools import ToolUse

TOOL_FORMATS: dict[str, Hermes] = {"hermes": Hermes()}


@dataclass(slots=True)
class Piece:
    """What became certain: text of one kind, and news of calls."""

    text: str = ""
    reasoning: bool = False
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, deltas: list[CallDelta]) -> None:
        self.calls += [msgspec.to_builtins(delta) for delta in deltas]


class Sections:
    """One text. The pieces do not depend on how the text is cut into deltas, but for where they are cut themselves.

    Thoughts are taken for such only at the beginning of a text; blanks around tags are no part of anything. Without
    markup everything is said. Of the latest text, `uncertain` tells that it waits because it may turn out to be no part
    of what is said, `unsaid` that it did.
    """

    def __init__(self, markup: TextMarkup, tools: ToolUse | None) -> None:
        self._tags = markup.reasoning
        self._format = TOOL_FORMATS[markup.tool_format] if tools is not None and markup.tool_format else None
        self._names = frozenset(function.name for function in tools.functions) if tools is not None else frozenset()
        self._single = tools is not None and not tools.parallel
        self._state = "text" if self._tags is None else "begin"
        self._held = ""
        self._blank = self._tags is not None
        self._reader: HermesReader | None = None
        self._calls = self._begun = 0
        self.uncertain = self.unsaid = False

    def follow(self, prompt: str) -> None:
        """Tells what the text follows: a prompt that ends with the opening tag has begun the thoughts."""
        if self._tags is not None and prompt.rstrip().endswith(self._tags[0]):
            self._state = "thoughts"

    @property
    def over(self) -> bool:
        """True when nothing more is wanted: the one call that was allowed is complete."""
        return self._single and self._calls > 0 and self._reader is None

    def push(self, delta: str) -> list[Piece]:
        """Takes text; gives what is certain, thoughts first."""
        self._held += delta
        pieces: list[Piece] = []
        while self._advance(pieces) and not self.over:
            pass
        if delta:
            self._judge(pieces)
        return _joined(pieces)

    def _judge(self, pieces: list[Piece]) -> None:
        """Blanks that wait behind something said count as said with it."""
        said = any(piece.text for piece in pieces if not piece.reasoning)
        calling = self._reader is not None and self._calls > self._begun
        held = self._held.strip() if said else self._held
        self.uncertain = not calling and (self._reader is not None or bool(held))
        self.unsaid = not (said or self.uncertain)

    def flush(self) -> list[Piece]:
        """The text ends: gives what was held back."""
        pieces: list[Piece] = []
        if self._reader is not None:
            last = Piece()
            last.add(self._reader.flush())
            last.text = self._reader.rest
            pieces.append(last)
        elif not self.over:
            pieces.append(Piece(self._held, self._state == "thoughts"))
        if self._held:
            self._held = ""
            self._judge(pieces)
        return _joined(pieces)

    def _advance(self, pieces: list[Piece]) -> bool:
        """One move; False when more text is needed for the next."""
        if self._reader is not None:
            return self._read_call(self._reader, pieces)
        if self._state == "begin":
            return self._begin()
        if self._blank:
            self._held = self._held.lstrip()
            self._blank = not self._held
        if not self._held:
            return False
        tag = self._next_tag()
        before, found, behind = self._held.partition(tag) if tag else (self._held, "", "")
        if not found:
            kept = _uncertain(self._held, tag)
            pieces.append(Piece(self._held[: len(self._held) - kept], self._state == "thoughts"))
            self._held = self._held[len(self._held) - kept :]
            return False
        pieces.append(Piece(before.rstrip(), self._state == "thoughts"))
        self._held, self._blank = behind, True
        if self._state == "thoughts":
            self._state = "text"
        elif self._format is not None:
            self._reader, self._begun = HermesReader(self._names, self._calls), self._calls
            self._blank = False
        return True

    def _next_tag(self) -> str:
        if self._state == "thoughts":
            return self._tags[1] if self._tags is not None else ""
        return self._format.opening if self._format is not None else ""

    def _begin(self) -> bool:
        assert self._tags is not None
        opening, text = self._tags[0], self._held.lstrip()
        if len(text) < len(opening) and opening.startswith(text):
            return False
        if text.startswith(opening):
            self._state, self._held = "thoughts", text[len(opening) :]
        else:
            self._state, self._blank = "text", False
        return True

    def _read_call(self, reader: HermesReader, pieces: list[Piece]) -> bool:
        text, self._held = self._held, ""
        news = Piece()
        news.add(reader.push(text))
        if news.calls:
            self._calls = news.calls[-1]["index"] + 1
            pieces.append(news)
        if not reader.over:
            return False
        self._reader = None
        if self._calls > self._begun:
            self._held, self._blank = reader.rest, True
        else:
            # What looked like a call is said: its opening tag is passed over, so that it is not read again.
            opening = self._format.opening if self._format is not None else ""
            pieces.append(Piece(opening))
            self._held = reader.rest.removeprefix(opening)
        return bool(self._held)


def _uncertain(text: str, tag: str) -> int:
    """How many last characters of `text` may be the beginning of `tag`, or blanks before it."""
    if not tag:
        return 0
    kept = overlap(text, tag)
    body = text[: len(text) - kept]
    return kept + len(body) - len(body.rstrip())


def _joined(pieces: list[Piece]) -> list[Piece]:
    """At most one piece of thoughts and one of the rest, without empty ones."""
    joined = [Piece(reasoning=True), Piece()]
    for piece in pieces:
        target = joined[0 if piece.reasoning else 1]
        target.text += piece.text
        target.calls += piece.calls
    return [piece for piece in joined if piece.text or piece.calls]
