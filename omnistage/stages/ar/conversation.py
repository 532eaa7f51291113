"""A conversation as prompt text, with the tools that its answer may call. Torch-free."""

from __future__ import annotations

from typing import Any

from omnistage.config.model import TextMarkup
from omnistage.request import StageRequest
from omnistage.stages.ar.chat_template import ChatTemplate
from omnistage.stages.ar.sections import TOOL_FORMATS


def conversation_text(
    template: ChatTemplate, messages: list[dict[str, Any]], markup: TextMarkup, request: StageRequest
) -> str:
    """The prompt. A template that does not read tools gets them, and earlier calls, in plain messages."""
    tools = request.tools
    if template.reads_tools or not markup.tool_format:
        return template.render(messages, None if tools is None else tools.shown)
    return template.render(TOOL_FORMATS[markup.tool_format].explained(messages, tools))
