"""What servers of the OpenAI routes answer, as far as a load generator reads it; whatever else they say is ignored."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from omnistage.request import RequestMetrics, StageMetrics

T = TypeVar("T")


class BadAnswer(Exception):
    """The answer tells of an error, or cannot be read; its text says which."""


class Audio(msgspec.Struct):
    """`data` is base64 PCM."""

    data: str | None = None
    transcript: str | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    audio: Audio | None = None


class Choice(msgspec.Struct):
    delta: Delta | None = None
    finish_reason: str | None = None
    metrics: Any = None


class Usage(msgspec.Struct):
    completion_tokens: int | None = None


class ChatEvent(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class ImageItem(msgspec.Struct):
    b64_json: str


class ImageAnswer(msgspec.Struct):
    data: list[ImageItem]
    metrics: Any = None


class ImageEvent(msgspec.Struct):
    type: str = ""
    b64_json: str = ""
    error: Any = None


class Job(msgspec.Struct):
    """A video job; `seconds` is the length that it tells, "" for none."""

    id: str
    status: str
    progress: float = 0
    seconds: str | None = None
    metrics: Any = None


def read_answer(data: bytes | str, kind: type[T]) -> T:
    """Raises BadAnswer for data of another shape."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise BadAnswer(f"unreadable answer: {str(error)[:120]}") from None


def event_of(line: str, kind: type[T]) -> T | None:
    """The event in a line of server-sent events. Raises BadAnswer as `read_answer` does."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return None
    return read_answer(line.removeprefix("data: "), kind)


def check_error(error: Any) -> None:
    """Raises BadAnswer for the `error` of an event, None being none."""
    if error is not None:
        told = error.get("message") if isinstance(error, dict) else error
        raise BadAnswer(f"error event: {str(told)[:120]}")


def stages_of(metrics: Any) -> dict[str, StageMetrics]:
    """The times per stage that an OmniStage server tells; empty for whatever else a server calls its metrics."""
    try:
        return msgspec.convert(metrics or {}, RequestMetrics).stages
    except msgspec.ValidationError:
        return {}
