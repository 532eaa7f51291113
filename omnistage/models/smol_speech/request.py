"""Checks of what a request to this pipeline may say, and the shapes in which stages get it. Torch-free."""

from __future__ import annotations

from typing import Any

from omnistage.errors import RequestError
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest

SPOKEN_SYSTEM_PROMPT = "Answer in one or two short sentences."
_ROLE_NAMES = {"developer": "system"}
ROLES = ("system", "developer", "user", "assistant", "tool")
_MODALITIES = {
    "chat": ("text", "audio"),
    "completion": ("text",),
    "speech": ("audio",),
    "transcription": ("text",),
}
_PARAMS = {
    "chat": ("speed",),
    "completion": ("prompt_token_ids",),
    "speech": ("speed",),
    "transcription": ("language", "prompt", "temperature", "timestamps"),
}
_PROMPTS = ("prompt", "raw_prompt", "messages")
MIN_SPEED, MAX_SPEED = 0.25, 4.0


def validate(request: OmniRequest, voices: tuple[str, ...]) -> None:
    """Checks task, modalities, voice, parameters and that there is exactly one prompt. Raises RequestError."""
    if request.task not in _MODALITIES:
        raise RequestError(f"task {request.task!r} is not served; known: {', '.join(_MODALITIES)}", param="task")
    _check_modalities(request)
    _check_prompt(request)
    if request.voice is not None and request.voice not in voices:
        raise RequestError(f"unknown voice {request.voice!r}; known: {', '.join(voices)}", param="voice")
    for name in request.params:
        if name not in _PARAMS[request.task]:
            raise RequestError(f"{name} is not a parameter of {request.task} here", param=name)
    _check_number(request.params, "speed", MIN_SPEED, MAX_SPEED)
    if request.messages is not None:
        _check_messages(request.messages)


def conversation(request: OmniRequest, speaks: bool) -> list[dict[str, Any]]:
    """The messages of a chat request. Spoken answers are asked to be short, unless there is a system message."""
    messages = request.messages or [{"role": "user", "content": request.prompt}]
    messages = [{**message, "role": _ROLE_NAMES.get(message["role"], message["role"])} for message in messages]
    if speaks and all(message["role"] != "system" for message in messages):
        messages = [{"role": "system", "content": SPOKEN_SYSTEM_PROMPT}, *messages]
    return messages


def used_media(messages: list[dict[str, Any]], media: dict[str, MultimodalPayload]) -> list[str]:
    """Keys of the audio parts of `messages`, in order. Raises RequestError when one is missing."""
    keys = [part["media"] for message in messages for part in _parts(message) if part["type"] == "audio"]
    for key in keys:
        if key not in media:
            raise RequestError(f"a message names the audio {key!r}, which the request does not hold", param="messages")
    return keys


def transcription_params(params: dict[str, Any]) -> dict[str, Any]:
    """The listener's parameters. Raises RequestError naming `language`, `prompt`, `temperature` or `timestamps`."""
    language = params.get("language")
    if language not in (None, "en", "english", "English"):
        raise RequestError(f"language {language!r} is not known to this model; it hears English (en)", param="language")
    prompt = params.get("prompt") or ""
    if not isinstance(prompt, str):
        raise RequestError("prompt must be a string", param="prompt")
    _check_number(params, "temperature", 0.0, 1.0)
    timestamps = params.get("timestamps", True)
    if not isinstance(timestamps, bool):
        raise RequestError("timestamps must be true or false", param="timestamps")
    return {
        "transcribes": True,
        "prompt": prompt,
        "temperature": float(params.get("temperature") or 0.0),
        "timestamps": timestamps,
    }


def _check_modalities(request: OmniRequest) -> None:
    known = _MODALITIES[request.task]
    if request.modalities is not None and not request.modalities:
        raise RequestError(f"no modality is asked for; known: {', '.join(known)}", param="modalities")
    for modality in request.modalities or ():
        if modality not in known:
            raise RequestError(
                f"modality {modality!r} is not an output of {request.task}; known: {', '.join(known)}",
                param="modalities",
            )


def _check_prompt(request: OmniRequest) -> None:
    given = [name for name in _PROMPTS if _prompts(request)[name] is not None]
    if request.task == "completion" and "prompt_token_ids" in request.params:
        given.append("prompt_token_ids")
    if request.task == "transcription":
        if given:
            raise RequestError("a transcription takes audio and no prompt of this kind", param=given[0])
        return
    if len(given) != 1:
        raise RequestError(f"give exactly one of {', '.join(_PROMPTS)}", param=given[-1] if given else "prompt")
    if given[0] == "messages" and request.task != "chat":
        raise RequestError(f"{request.task} takes a prompt, not messages", param="messages")


def _prompts(request: OmniRequest) -> dict[str, Any]:
    """The prompt fields of a request, by name."""
    return {"prompt": request.prompt, "raw_prompt": request.raw_prompt, "messages": request.messages}


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"messages[{index}].role {role!r} is none of {', '.join(ROLES)}", param="messages")
        for part in _parts(message):
            _check_part(part, index)


def _check_part(part: Any, index: int) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "audio"):
        raise RequestError(
            f"messages[{index}]: a part of type {kind!r} is not understood; this model takes text and audio",
            param="messages",
        )
    field = "text" if kind == "text" else "media"
    if not isinstance(part.get(field), str):
        raise RequestError(f"messages[{index}]: a part of type {kind!r} needs the string {field}", param="messages")


def _parts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError("a message's content must be a string or a list of parts", param="messages")
    return content


def _check_number(params: dict[str, Any], name: str, minimum: float, maximum: float) -> None:
    value = params.get(name)
    if value is None and name not in params:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise RequestError(f"{name} must be a number from {minimum} to {maximum}, not {value!r}", param=name)
