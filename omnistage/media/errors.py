"""Errors of media that clients send. FFmpeg's and Pillow's own texts are never passed on."""

from __future__ import annotations

import struct
import zlib

import av

from omnistage.errors import ErrorCode, RequestError

# What decoders raise on hostile bytes.
DECODER_ERRORS: tuple[type[Exception], ...] = (
    av.error.FFmpegError,
    ValueError,
    OSError,
    EOFError,
    SyntaxError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    AttributeError,
    ZeroDivisionError,
    NotImplementedError,
    MemoryError,
    struct.error,
    zlib.error,
)


def unsupported(message: str, param: str) -> RequestError:
    """The error for media that cannot be read."""
    return RequestError(f"{param}: {message}", code=ErrorCode.UNSUPPORTED_MEDIA, param=param)


def too_large(message: str, param: str) -> RequestError:
    """The error for media beyond a limit."""
    return RequestError(f"{param}: {message}", code=ErrorCode.TOO_LARGE, param=param)


def refused(message: str, param: str) -> RequestError:
    """The error for media that this server does not take."""
    return RequestError(f"{param}: {message}", param=param)
