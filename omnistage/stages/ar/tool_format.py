"""The notations in which models write tool calls (`ToolFormat`). Torch-free."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from omnistage.tools import ToolUse


class CallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """News of the call number `index`: its `name` once at its beginning, then pieces of its `arguments` (JSON text)."""

    index: int
    name: str = ""
    arguments: str = ""


class CallReader(Protocol):
    """Reads one call, from behind the tag that opens it."""

    @property
    def over(self) -> bool:
        """True when the call has ended, or turned out to be none."""
        ...

    @property
    def rest(self) -> str:
        """Text that is not of the call: after its end, or all of it (opening tag included) when it was none."""
        ...

    def push(self, text: str) -> list[CallDelta]:
        """Takes the next piece of text; gives what became certain."""
        ...

    def flush(self) -> list[CallDelta]:
        """The text ends here: gives what is left, and is over."""
        ...


class ToolFormat(Protocol):
    """One notation. `opening` is the tag at the beginning of every call."""

    @property
    def opening(self) -> str: ...

    def reader(self, names: frozenset[str], index: int) -> CallReader:
        """A reader for call number `index`; only functions in `names` can be called."""
        ...

    def calls_grammar(self, tools: ToolUse, otherwise: str | None) -> str:
        """A Lark grammar of texts that are calls with arguments after their schemas: nothing else if `otherwise` is
        "", else or the text of that Lark expression. None: any text, with calls anywhere in it."""
        ...

    def explained(self, messages: list[dict[str, Any]], tools: ToolUse | None) -> list[dict[str, Any]]:
        """A conversation with its tools, calls and their results in plain messages, for templates that know none."""
        ...
