"""The closed set of errors that OmniStage raises, returns and serialises.

An error names the thing, the stage and the fix. Its text never carries file paths of the server, addresses or reprs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum

import msgspec


class ErrorCode(StrEnum):
    """What went wrong, as a client sees it. `HTTP_STATUS` gives the matching status."""

    INVALID_REQUEST = "invalid_request"
    UNKNOWN_MODEL = "model_not_found"
    NOT_FOUND = "not_found"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    TOO_LARGE = "payload_too_large"
    UNSUPPORTED_MEDIA = "unsupported_media"
    OVERLOADED = "overloaded"
    ABORTED = "aborted"
    DEADLINE = "deadline_exceeded"
    HANDOFF = "handoff_failed"
    STAGE_FAILED = "stage_failed"
    STAGE_DIED = "stage_died"
    UNAVAILABLE = "stage_unavailable"
    CONFIG = "invalid_config"
    INTERNAL = "internal_error"


HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.UNKNOWN_MODEL: 404,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.UNSUPPORTED_MEDIA: 415,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.ABORTED: 499,
    ErrorCode.CONFIG: 500,
    ErrorCode.INTERNAL: 500,
    ErrorCode.STAGE_FAILED: 500,
    ErrorCode.HANDOFF: 502,
    ErrorCode.STAGE_DIED: 502,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.DEADLINE: 504,
}


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as plain data: crosses processes and ends up in answers.

    `param` names the request field at fault, `stage` and `edge` where it happened, `retry_after_s` when to come back.
    """

    code: ErrorCode
    message: str
    param: str | None = None
    stage: str | None = None
    edge: str | None = None
    retry_after_s: float | None = None


class OmniError(Exception):
    """Base of every error that is allowed to leave OmniStage."""

    default_code = ErrorCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode | None = None,
        param: str | None = None,
        stage: str | None = None,
        edge: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.info = ErrorInfo(code or self.default_code, message, param, stage, edge, retry_after_s)

    @classmethod
    def from_info(cls, info: ErrorInfo) -> OmniError:
        """The exception for an error that came from another process."""
        error = cls(info.message)
        error.info = info
        return error


class ConfigError(OmniError):
    """A configuration that cannot be used: names key, value and fix."""

    default_code = ErrorCode.CONFIG


class RequestError(OmniError):
    """The request is at fault (4xx): names the parameter."""

    default_code = ErrorCode.INVALID_REQUEST


class StageError(OmniError):
    """A stage is at fault: names the stage."""

    default_code = ErrorCode.STAGE_FAILED


class IntegrityError(AssertionError):
    """An owner of a resource found its own books wrong (`check_integrity`)."""


def field_of(error: msgspec.ValidationError) -> str | None:
    """The field that a message such as "Expected `int`, got `str` - at `$.width`" is about."""
    _, at, path = str(error).rpartition("`$.")
    return path.rstrip("`") if at else None


def hint_for(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names, or all of them."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(choices)}"
