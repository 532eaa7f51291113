"""Tool calls as Hermes, Qwen and SmolLM write them: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`.

The system prompt is the one of Qwen's chat templates. Torch-free.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from omnistage.stages.ar.grammar import function_schema
from omnistage.tools import ToolUse

OPENING, CLOSING = "<tool_call>", "</tool_call>"
MAX_CALLS = 16
# Nobody names a function at such length: what is longer is no call.
_MAX_HEAD = 4096
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

# Text up to and with an opening tag, the call behind it, and so on; the last text has no such tag.
_ANYWHERE = (
    "start: (before call)* after",
    f"before[lazy]: /(?s:.*){OPENING}/",
    "after: /(?s:.*)/",
)


class CallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """News of the call number `index`: its `name` once at its beginning, then pieces of its `arguments` (JSON text)."""

    index: int
    name: str = ""
    arguments: str = ""


class ObjectEnd:
    """Finds where a JSON object ends in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def find(self, text: str) -> int | None:
        """The index behind the object's last bracket, None when it is not in `text`."""
        for index, char in enumerate(text):
            if self._take(char):
                return index + 1
        return None

    def _take(self, char: str) -> bool:
        if self._quoted:
            self._quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return False
        self._quoted = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return self._depth == 0 and char in "}]"


class HermesReader:
    """Reads call number `index`, from behind the tag that opens it; only functions in `names` can be called. Nothing is
    given before the name and the beginning of the arguments are certain.

    `over` once the call has ended, or turned out to be none; `rest` is then text that is not of the call: after its
    end, or all of it (opening tag included) when it was none.
    """

    def __init__(self, names: frozenset[str], index: int) -> None:
        self._names = names
        self._index = index
        self._text = ""
        self._arguments: ObjectEnd | None = None
        self._complete = False
        self.over = False
        self.rest = ""

    def push(self, text: str) -> list[CallDelta]:
        """Takes the next piece of text; gives what became certain."""
        self._text += text
        if self._complete:
            return self._close()
        if self._arguments is not None:
            return self._argue("")
        head = _HEAD.match(self._text)
        if head is not None and (name := str(json.loads(head[1], strict=False))) in self._names:
            self._arguments, self._text = ObjectEnd(), self._text[head.end() :]
            return self._argue(name)
        if CLOSING in self._text:
            return self._whole()
        if len(self._text) > _MAX_HEAD:
            self._refuse()
        return []

    def flush(self) -> list[CallDelta]:
        """The text ends here: gives what is left, and is over."""
        if self._arguments is None and not self.over:
            self._refuse()
        self.over = True
        return []

    def _argue(self, name: str) -> list[CallDelta]:
        assert self._arguments is not None
        end = self._arguments.find(self._text)
        piece, self._text = (self._text, "") if end is None else (self._text[:end], self._text[end:])
        delta = CallDelta(self._index, name, piece)
        if end is not None:
            self._complete = True
            self._close()
        return [delta] if name or piece else []

    def _close(self) -> list[CallDelta]:
        _, found, behind = self._text.partition(CLOSING)
        if found:
            self.over, self.rest = True, behind
        return []

    def _whole(self) -> list[CallDelta]:
        """A complete call in another order or without arguments."""
        inner, _, behind = self._text.partition(CLOSING)
        call = _loaded(inner)
        name = call.get("name")
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _loaded(arguments)
        if name not in self._names or not isinstance(arguments, dict):
            self._refuse()
            return []
        self.over, self.rest = True, behind
        return [CallDelta(self._index, str(name), json.dumps(arguments, ensure_ascii=False))]

    def _refuse(self) -> None:
        self.over, self.rest = True, OPENING + self._text


class Hermes:
    """The notation. `opening` is the tag at the beginning of every call."""

    opening = OPENING

    def calls_grammar(self, tools: ToolUse, otherwise: str | None) -> str:
        """A Lark grammar of texts that are calls with arguments after their schemas: nothing else if `otherwise` is
        "", else or the text of that Lark expression. None: any text, with calls anywhere in it."""
        opening = json.dumps(OPENING) if otherwise is not None else ""
        many = f'("\\n" call){{0,{MAX_CALLS - 1}}}' if tools.parallel else ""
        rules = [f"calls: call {many}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools.functions)))]
        for index, function in enumerate(tools.functions):
            schema = json.dumps(function_schema(function.parameters))
            head = json.dumps(f'\n{{"name": "{function.name}", "arguments": ')
            tail = json.dumps("}\n" + CLOSING)
            rules += [f"call_{index}: {opening} {head} arguments_{index} {tail}", f"arguments_{index}: %json {schema}"]
        if otherwise == "":
            return "\n".join(["start: calls", *rules])
        if otherwise is None:
            return "\n".join([*_ANYWHERE, *rules])
        return "\n".join(["start: calls | answer", f"answer: {otherwise}", *rules])

    def explained(self, messages: list[dict[str, Any]], tools: ToolUse | None) -> list[dict[str, Any]]:
        """A conversation with its tools, calls and their results in plain messages, for templates that know none."""
        plain = [_plain(message) for message in messages]
        if tools is None:
            return plain
        signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools.shown)
        text = _SYSTEM.format(signatures=signatures)
        if plain and plain[0]["role"] == "system":
            return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
        return [{"role": "system", "content": text}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the fields that belong to tools."""
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"{OPENING}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSING}" for call in calls]
    return {"role": "assistant", "content": "\n".join([content, *written] if content else written)}


def _loaded(text: str) -> dict[str, Any]:
    """The JSON object in `text`; empty when it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
