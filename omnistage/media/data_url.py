"""Bytes inside text: strict base64 and data URLs (RFC 2397, base64 form only)."""

from __future__ import annotations

import base64
import binascii

from omnistage.media.errors import refused, too_large

MAX_HEADER_CHARS = 256


def decode_base64(text: str, max_bytes: int, param: str) -> bytes:
    """The bytes of strict base64 (no line breaks, padding required). Raises RequestError naming `param`."""
    if len(text) // 4 * 3 > max_bytes + 2:
        raise too_large(f"more than {max_bytes} bytes", param)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise refused("not valid base64", param) from None


def decode_data_url(url: str, max_bytes: int, param: str) -> bytes:
    """The bytes of a `data:<type>;base64,<data>` URL. Raises RequestError naming `param`; other URLs are refused."""
    if not url.startswith("data:"):
        raise refused("remote URLs are not fetched by this server; send a data: URL with base64 content", param)
    header, comma, body = url[: MAX_HEADER_CHARS + 1].partition(",")
    if not comma or not header.endswith(";base64"):
        raise refused("a data URL must read data:<type>;base64,<data>", param)
    return decode_base64(url[len(header) + 1 :] if body or len(url) > len(header) else "", max_bytes, param)
