"""Functions that a model may call, as OpenAI's chat completions describe them, and the calls in earlier messages."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec

from omnistage.errors import RequestError

MAX_TOOLS = 128
FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`parameters` is a JSON schema; with `strict` arguments obey it even when the call is the model's own idea."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"]


class MadeCall(msgspec.Struct, kw_only=True):
    """A call that a model made; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


class MadeCalls:
    """The calls of one answer, put together from the news of its events."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self.calls: list[MadeCall] = []

    def take(self, news: list[dict[str, Any]]) -> None:
        """News: `{"index", "name"?, "arguments"?}`, a name where a call begins."""
        for item in news:
            if item["index"] == len(self.calls):
                digest = blake2b(f"{self._request_id} {item['index']}".encode(), digest_size=12).hexdigest()
                self.calls.append(MadeCall(id=f"call_{digest}", name=item.get("name", "")))
            self.calls[item["index"]].arguments += item.get("arguments", "")


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of one request. `shown` is what the chat template gets: the tools as the client wrote them.

    `choice` "required" demands a call of one of `functions`; with `parallel` there may be several calls.
    """

    shown: list[dict[str, Any]]
    functions: list[Function]
    choice: Literal["auto", "required"] = "auto"
    parallel: bool = True

    @property
    def enforced(self) -> bool:
        """True when calls are held to their schemas while they are written."""
        return self.choice == "required" or any(function.strict for function in self.functions)


def tool_use(tools: list[dict[str, Any]], choice: str | dict[str, Any] | None, *, parallel: bool) -> ToolUse | None:
    """The tools that may be called; None without tools or with choice "none". Raises RequestError naming the field."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice: there are no tools", param="tool_choice")
        return None
    functions = _functions(tools)
    if choice == "none":
        return None
    if choice in (None, "auto"):
        return ToolUse(shown=tools, functions=functions, parallel=parallel)
    if choice == "required":
        return ToolUse(shown=tools, functions=functions, choice="required", parallel=parallel)
    chosen = [function for function in functions if function.name == _named(choice)]
    if not chosen:
        raise RequestError("tool_choice: none of the tools has this name", param="tool_choice")
    return ToolUse(shown=tools, functions=chosen, choice="required", parallel=False)


def _functions(tools: list[dict[str, Any]]) -> list[Function]:
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools: more than {MAX_TOOLS}", param="tools")
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    names = [function.name for function in functions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"tools: two functions are named {twice!r}", param="tools")
    return functions


def _function(tool: Any, where: str) -> Function:
    try:
        function = msgspec.convert(tool, Tool).function
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}: {error}", param=where) from None
    if (function.parameters or {}).get("type", "object") != "object":
        field = f"{where}.function.parameters"
        raise RequestError(f'{field}: arguments are an object, so the schema is of type "object"', param=field)
    return function


def _named(choice: Any) -> str:
    """The name in `{"type": "function", "function": {"name": ...}}`."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            'tool_choice is "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    return name


def with_read_calls(message: Any, where: str) -> Any:
    """A message as chat templates want it: the arguments of its tool calls as objects, content never null beside them.

    Raises RequestError naming the call.
    """
    if not isinstance(message, dict) or not message.get("tool_calls"):
        return message
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    read = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return {**message, "content": message.get("content") or "", "tool_calls": read}


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} needs function.name", param=where)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = read_arguments(arguments or "{}")
    if not isinstance(arguments, dict):
        field = f"{where}.function.arguments"
        raise RequestError(f"{field} must be a JSON object", param=field)
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call as the model wrote them; None when `text` is no JSON object, or not a whole one."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None
