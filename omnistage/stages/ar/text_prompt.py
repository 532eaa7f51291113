"""From chat messages to prompt text: content parts flattened, tools explained, the template filled. Torch-free."""

from __future__ import annotations

from typing import Any

from omnistage.config.model import TextMarkup
from omnistage.errors import RequestError
from omnistage.request import StageRequest
from omnistage.stages.ar.chat_template import ChatTemplate
from omnistage.stages.ar.sections import TOOL_FORMATS


def flatten_messages(messages: Any, transcripts: list[str]) -> list[dict[str, Any]]:
    """Messages with string content: text parts as they are, audio parts as what was said in them, joined by newlines.

    `transcripts` holds one text per audio part, in order of appearance. Raises RequestError for malformed messages,
    parts of other kinds, and when the numbers of audio parts and transcripts differ.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a non-empty list", param="messages")
    spoken = list(reversed(transcripts))
    flat = [_flatten(message, index, spoken) for index, message in enumerate(messages)]
    if spoken:
        raise RequestError(f"{len(spoken)} transcripts belong to no audio part of the messages", param="messages")
    return flat


def _flatten(message: Any, index: int, spoken: list[str]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} needs a role", param=where)
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        parts = [_part(part, f"{where}.content[{number}]", spoken) for number, part in enumerate(content)]
        content = "\n".join(parts)
    if not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    return {**message, "content": content}


def _part(part: Any, where: str, spoken: list[str]) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"{where} must be an object", param=where)
    kind, text = part.get("type"), part.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    if kind == "audio":
        if not spoken:
            raise RequestError(f"{where}: this stage has not heard the audio", param=where)
        return spoken.pop()
    raise RequestError(f"{where}: a text stage cannot read a part of type {str(kind)[:32]!r}", param=where)


def conversation_text(
    template: ChatTemplate, messages: list[dict[str, Any]], markup: TextMarkup, request: StageRequest
) -> str:
    """The prompt. A template that does not read tools gets them, and earlier calls, in plain messages."""
    tools = request.tools
    if template.reads_tools or not markup.tool_format:
        return template.render(messages, None if tools is None else tools.shown)
    return template.render(TOOL_FORMATS[markup.tool_format].explained(messages, tools))
