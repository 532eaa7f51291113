"""Byte ranges of files (RFC 9110, 14): browsers seek in videos with them, and some play none without."""

from __future__ import annotations

import re

_RANGE = re.compile(rb"bytes=(\d{0,15})-(\d{0,15})")


def wanted_range(header: bytes, size: int) -> tuple[int, int] | None:
    """The first byte of `bytes=FIRST-LAST`, `FIRST-` or `-COUNT`, and the one behind the last, of `size` bytes.

    None for anything else, several ranges included: a server may ignore the header, and then gives the whole file.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or match[0] == b"bytes=-":
        return None
    first, last = match.groups()
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    return (start, stop) if start < stop else None


def content_range(wanted: tuple[int, int], size: int) -> bytes:
    """The value of the header that goes with status 206."""
    return f"bytes {wanted[0]}-{wanted[1] - 1}/{size}".encode()
