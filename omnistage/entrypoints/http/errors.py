"""Errors as OpenAI writes them: `{"error": {message, type, param, code}}`, plus `stage` where one is at fault."""

from __future__ import annotations

import math

import msgspec

from omnistage.entrypoints.http.asgi import JSON, Exchange, Header
from omnistage.errors import HTTP_STATUS, ErrorCode, ErrorInfo

_TYPES: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
MAX_MESSAGE_CHARS = 600


class ErrorDetail(msgspec.Struct):
    """`param` is the request field at fault; `stage` is left out when no stage is."""

    message: str
    type: str
    param: str | None
    code: str
    stage: str | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def error_body(info: ErrorInfo, status: int | None = None) -> bytes:
    """The JSON of an error."""
    code = status or HTTP_STATUS[info.code]
    kind = _TYPES.get(code, "server_error" if code >= 500 else "invalid_request_error")
    message = info.message[:MAX_MESSAGE_CHARS]
    detail = ErrorDetail(message, kind, info.param, info.code.value, info.stage or msgspec.UNSET)
    return msgspec.json.encode(ErrorBody(detail))


async def send_error(exchange: Exchange, info: ErrorInfo, unread: bool = False) -> None:
    """Answers with an error. With `unread`, the connection closes after it and the caller still calls `end()`."""
    status, body = HTTP_STATUS[info.code], error_body(info)
    headers: tuple[Header, ...] = ((b"content-length", str(len(body)).encode()),)
    if unread:
        headers = (*headers, (b"connection", b"close"))
    if status == HTTP_STATUS[ErrorCode.UNAUTHORIZED]:
        headers = (*headers, (b"www-authenticate", b"Bearer"), (b"www-authenticate", b'Basic realm="omnistage"'))
    if info.retry_after_s is not None:
        headers = (*headers, (b"retry-after", str(max(1, math.ceil(info.retry_after_s))).encode()))
        headers = (*headers, (b"retry-after-ms", str(math.ceil(info.retry_after_s * 1000)).encode()))
    await exchange.start(status, JSON, headers)
    await (exchange.write(body) if unread else exchange.end(body))


def internal_error() -> ErrorInfo:
    """What a client is told about a defect of the server."""
    return ErrorInfo(ErrorCode.INTERNAL, "internal error; the server's log has the details under this request id")
