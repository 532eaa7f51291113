"""From what a request demands of a text to one grammar of llguidance, and its check. Torch-free.

Grammars are clients' programs: text and nesting are bounded here, the work at each step by `LIMITS` of the matcher.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec

from omnistage.errors import RequestError
from omnistage.sampling import SamplingParams, StructuredOutputs
from omnistage.tools import ToolUse

if TYPE_CHECKING:
    from llguidance import LLParserLimits

    from omnistage.stages.ar.hermes import Hermes

MAX_GRAMMAR_CHARS = 1 << 18
MAX_REGEX_CHARS = 1 << 14
MAX_CHOICES = 4096
MAX_NESTING = 100
# Names that lead to names are followed recursively: (names in a grammar) x (nesting) bounds the depth of the stack.
MAX_DEPTH = 1500
# Runs of blanks between the tokens of JSON: long enough for indented text, never endless.
BLANKS = r"[\x20\x0A\x0D\x09]{1,32}"
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_NAMES = re.compile(r"\$ref|\$dynamicRef|^\s*[\w.!?-]+(?:\[[^\]]*\]|\{[^}]*\})*\s*(?:::=|:)", re.MULTILINE)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_LISTING = re.compile(r"\n +\d+ \| .*", re.DOTALL)


def parser_limits() -> LLParserLimits:
    """Bounds of one matcher. Fuel is regex work: a step spends at most some 15 ms in the lexer."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def request_grammar(sampling: SamplingParams, tools: ToolUse | None, tool_format: Hermes | None) -> str | None:
    """The grammar (llguidance's notation) of a request's text, None when it is free.

    With tools that need not be called the text is what was demanded, or calls. Raises RequestError for demands that
    contradict each other or are too large.
    """
    wanted = sampling.structured_outputs
    if wanted is not None and sampling.ignore_eos:
        raise RequestError("ignore_eos: a text of a given shape has an end", param="ignore_eos")
    if tools is None or tool_format is None or not (tools.enforced or wanted is not None):
        return None if wanted is None else _whole(wanted)
    if sampling.ignore_eos:
        raise RequestError("ignore_eos: tool calls have an end", param="ignore_eos")
    return _calls(tools, tool_format, _beside_calls(tools, wanted))


def _beside_calls(tools: ToolUse, wanted: StructuredOutputs | None) -> str | None:
    """What a text may be instead of calls: a Lark expression, "" for nothing else, None for anything."""
    if wanted is None:
        return "" if tools.choice == "required" else None
    if tools.choice == "required":
        raise RequestError(f"{wanted.param}: the answer has to be a tool call", param=wanted.param)
    if wanted.json is None and not wanted.json_object:
        raise RequestError(f"{wanted.param}: beside tools only JSON can be demanded", param=wanted.param)
    _whole(wanted)
    return f"%json {json.dumps(_schema(wanted))}"


def check_grammar(grammar: str, param: str) -> None:
    """Raises RequestError naming `param` for a grammar that cannot be used. Takes up to a second for the largest."""
    from llguidance import LLMatcher

    complaint = LLMatcher.validate_grammar(grammar, limits=parser_limits())
    if complaint:
        raise RequestError(f"{param}: {one_line(complaint)}", param=param)


def one_line(complaint: str) -> str:
    """A message of the library without its listing of the grammar, in one line of at most 300 characters."""
    return " ".join(_LISTING.sub("", complaint).split())[:300]


def function_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a function's arguments; blanks are bounded and what cannot be enforced is left to the model."""
    return {"type": "object", **(parameters or {}), "x-guidance": {"whitespace_pattern": BLANKS, "lenient": True}}


def _calls(tools: ToolUse, tool_format: Hermes, otherwise: str | None) -> str:
    """Schemas of different functions do not lead to each other, so each is bounded alone."""
    from llguidance import LLMatcher

    for function in tools.functions:
        _check_size(json.dumps(function.parameters), "tools")
    lark = tool_format.calls_grammar(tools, otherwise)
    if len(lark) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"tools: more than {MAX_GRAMMAR_CHARS} characters", param="tools")
    return str(LLMatcher.grammar_from_lark(lark))


def _whole(wanted: StructuredOutputs) -> str:
    values = msgspec.structs.asdict(wanted)
    given = [kind for kind in _KINDS if values[kind] not in (None, False)]
    if len(given) != 1:
        raise RequestError(f"{wanted.param}: give exactly one of {', '.join(_KINDS)}", param=wanted.param)
    if wanted.choice is not None:
        return _bounded(_alternatives(wanted.choice, wanted.param), wanted.param)
    if wanted.regex is not None:
        return _expression(wanted.regex, wanted.param)
    if wanted.grammar is not None:
        return _bounded(_lark(wanted.grammar, wanted.param), wanted.param)
    return _bounded(f"start: %json {json.dumps(_schema(wanted))}", wanted.param)


def _schema(wanted: StructuredOutputs) -> dict[str, Any]:
    """The JSON schema with the options of its compiler."""
    schema: Any = {"type": "object"} if wanted.json is None else wanted.json
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{wanted.param}: the schema is not JSON: {error}", param=wanted.param) from None
    if not isinstance(schema, dict):
        raise RequestError(f"{wanted.param}: a JSON schema is an object", param=wanted.param)
    options: dict[str, Any] = {"lenient": not wanted.strict, "coerce_one_of": not wanted.strict}
    blanks = {"whitespace_flexible": False} if wanted.disable_any_whitespace else {"whitespace_pattern": BLANKS}
    return {**schema, "x-guidance": options | blanks}


def _alternatives(choices: tuple[str, ...], param: str) -> str:
    if len(choices) > MAX_CHOICES or not all(choices):
        raise RequestError(f"{param}: 1 to {MAX_CHOICES} texts that are not empty", param=param)
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _expression(regex: str, param: str) -> str:
    from llguidance import LLMatcher

    if len(regex) > MAX_REGEX_CHARS:
        raise RequestError(f"{param}: more than {MAX_REGEX_CHARS} characters", param=param)
    return str(LLMatcher.grammar_from_regex(regex))


def _lark(text: str, param: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    _check_size(text, param)
    try:
        return str(any_to_lark(text))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param}: {one_line(str(error))}", param=param) from None


def _bounded(lark: str, param: str) -> str:
    from llguidance import LLMatcher

    _check_size(lark, param)
    return str(LLMatcher.grammar_from_lark(lark))


def _check_size(text: str, param: str) -> None:
    """Raises RequestError for what would take a compiler too long or too deep."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"{param}: more than {MAX_GRAMMAR_CHARS} characters", param=param)
    depth = nesting(_QUOTED.sub("", text))
    names = len(_NAMES.findall(text))
    if depth > MAX_NESTING or names * max(depth, 1) > MAX_DEPTH * (1 if names > 1 else MAX_NESTING):
        raise RequestError(f"{param}: nested too deeply, or too many names that lead to names", param=param)


def nesting(text: str) -> int:
    """How deep brackets are nested in `text`."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(0, depth - 1)
    return deepest
