"""What a request to Qwen3-Omni may say. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from omnistage.errors import RequestError
from omnistage.request import OmniRequest

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TOOL_FIELDS = ("tool_calls", "tool_call_id")
PART_KINDS = ("text", "audio", "image", "video")
# Placeholders that the model's processor replaces by media: nobody may write them as text.
_PLACEHOLDERS = ("<|audio_pad|>", "<|image_pad|>", "<|video_pad|>")


class ProcessorArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`mm_processor_kwargs`. `fps`: frames per second that are taken of a video (default 2, or 1 for bare frames).

    With `use_audio_in_video` every video is heard as well: its own sound track, or else the message's next audio part.
    """

    use_audio_in_video: bool = False
    fps: Annotated[float, msgspec.Meta(gt=0, le=240)] | None = None


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of this model. `return_codes` gives the codec frames to the client too."""

    return_codes: bool = False
    mm_processor_kwargs: ProcessorArgs = ProcessorArgs()
    cache_salt: str = ""


def read_params(params: dict[str, Any]) -> Params:
    """Raises RequestError naming the parameter."""
    for name in params:
        if name not in Params.__struct_fields__:
            raise RequestError(f"{name} is not a parameter of this model", param=name)
    for name, value in params.items():
        try:
            msgspec.convert({name: value}, Params)
        except msgspec.ValidationError as error:
            raise RequestError(f"{name}: {error}", param=name) from None
    return msgspec.convert(params, Params)


def validate(request: OmniRequest, *, speaks: bool) -> tuple[str, ...]:
    """The modalities to produce, in the order text, audio. Raises RequestError naming the field."""
    known = ("text", "audio") if speaks else ("text",)
    asked = known if request.modalities is None else request.modalities
    if not asked:
        raise RequestError(f"no modality is asked for; known: {', '.join(known)}", param="modalities")
    for modality in asked:
        if modality not in known:
            why = "" if speaks or modality != "audio" else " (this checkpoint or deployment has no talker)"
            raise RequestError(
                f"modality {modality!r} is not offered; known: {', '.join(known)}{why}", param="modalities"
            )
    _check_source(request)
    return tuple(modality for modality in known if modality in asked)


def _check_source(request: OmniRequest) -> None:
    sources = {"prompt": request.prompt, "raw_prompt": request.raw_prompt, "messages": request.messages}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise RequestError("give exactly one of prompt, raw_prompt, messages", param=given[-1] if given else "messages")


def conversation(request: OmniRequest) -> list[dict[str, Any]]:
    """The messages of a request, checked; empty for a raw prompt. Raises RequestError naming the message."""
    if request.raw_prompt is not None:
        _check_text(request.raw_prompt, "raw_prompt")
        return []
    messages = request.messages
    if messages is None:
        messages = [{"role": "user", "content": request.prompt}]
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise RequestError(f"{where}.role {str(role)[:32]!r} is none of {', '.join(ROLES)}", param=where)
    content = message.get("content")
    if isinstance(content, str):
        _check_text(content, where)
    elif isinstance(content, list):
        for number, part in enumerate(content):
            _check_part(part, f"{where}.content[{number}]")
    else:
        raise RequestError(f"{where}.content must be a string or a list of parts", param=where)
    return {"role": ROLES[role], "content": content} | {key: message[key] for key in _TOOL_FIELDS if key in message}


def _check_part(part: Any, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in PART_KINDS:
        raise RequestError(
            f"{where}: a part of type {str(kind)[:32]!r} is not understood; this model takes {', '.join(PART_KINDS)}",
            param=where,
        )
    field = "text" if kind == "text" else "media"
    if not isinstance(part.get(field), str):
        raise RequestError(f"{where}: a part of type {kind!r} needs the string {field}", param=where)
    if kind == "text":
        _check_text(part["text"], where)


def _check_text(text: str, where: str) -> None:
    for token in _PLACEHOLDERS:
        if token in text:
            raise RequestError(f"{where}: text must not contain the model's placeholder {token}", param=where)
