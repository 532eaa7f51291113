"""Checks what a request demands of its text (shape, tools) before any stage works for it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from omnistage.config.model import RequestPlan, StageSpec, Variant
from omnistage.errors import RequestError
from omnistage.request import OmniRequest
from omnistage.sampling import SamplingParams, sampling_params
from omnistage.stages.ar.grammar import check_grammar, request_grammar
from omnistage.stages.ar.sections import TOOL_FORMATS
from omnistage.tools import ToolUse, tool_use, with_read_calls

CAPABILITY = "structured"


def tools_of(request: OmniRequest) -> ToolUse | None:
    """The tools that the request's answer may call. Raises RequestError naming the field."""
    return tool_use(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)


def with_read_messages(request: OmniRequest) -> OmniRequest:
    """The request with the tool calls in its messages as chat templates want them. Raises RequestError."""
    if request.messages is None:
        return request
    read = [with_read_calls(message, f"messages[{at}]") for at, message in enumerate(request.messages)]
    return msgspec.structs.replace(request, messages=read)


async def check_text_demands(request: OmniRequest, plan: RequestPlan, graph: Variant) -> None:
    """Raises RequestError for tools and shapes that no stage of the plan can honour, and for bad schemas and grammars.

    Grammars are compiled in a thread: the largest take a good part of a second.
    """
    tools = tools_of(request)
    demands = {stage: layer for stage, layer in request.sampling.items() if "structured_outputs" in layer}
    if tools is None and not demands:
        return
    specs = [spec for spec in graph.stages if spec.name in plan.stages]
    if tools is not None:
        _check_tools(request, specs)
    for stage, sampling in (demands or {"": {}}).items():
        await _check_grammar(stage, sampling, tools, specs)


def _check_tools(request: OmniRequest, specs: list[StageSpec]) -> None:
    if not any(spec.markup.tool_format for spec in specs):
        raise RequestError("tools: this model was not taught to call any", param="tools")
    if request.raw_prompt is not None or request.task != "chat":
        raise RequestError("tools: only a conversation has tools (messages or prompt)", param="tools")


async def _check_grammar(stage: str, layer: dict[str, Any], tools: ToolUse | None, specs: list[StageSpec]) -> None:
    sampling = _demand(stage, layer)
    able = [spec for spec in specs if CAPABILITY in spec.capabilities and stage in ("", spec.name)]
    wanted = sampling.structured_outputs
    if wanted is not None and not able:
        raise RequestError(f"{wanted.param}: no stage of this request writes such texts", param=wanted.param)
    formats = [TOOL_FORMATS[spec.markup.tool_format] for spec in able if spec.markup.tool_format]
    if tools is not None and tools.enforced:
        await _check_functions(tools)
    grammar = request_grammar(sampling, tools, formats[0] if formats else None)
    if grammar is not None:
        await asyncio.to_thread(check_grammar, grammar, "tools" if wanted is None else wanted.param)


def _demand(stage: str, layer: dict[str, Any]) -> SamplingParams:
    given: dict[str, Any] = {key: layer[key] for key in ("structured_outputs", "ignore_eos") if key in layer}
    return sampling_params(stage or "text", given)


async def _check_functions(tools: ToolUse) -> None:
    """Each schema alone, so that the error names the function."""
    for function in tools.functions:
        at = next(i for i, tool in enumerate(tools.shown) if tool["function"]["name"] == function.name)
        alone = msgspec.structs.replace(tools, functions=[function])
        param = f"tools[{at}].function.parameters"
        for form in TOOL_FORMATS.values():
            grammar = request_grammar(SamplingParams(), alone, form)
            assert grammar is not None, "enforced calls have a grammar"
            await asyncio.to_thread(check_grammar, grammar, param)
