"""API keys: who may call which route. With a key file everything that is not "open" is denied by default.

A key file holds one key per line, never the key itself: `<sha256 of the key, hex> <scopes> <name>`, with scopes out of
infer, admin and metrics separated by commas. `#` starts a comment.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

import msgspec

from omnistage.entrypoints.http.asgi import Scope
from omnistage.errors import ConfigError, ErrorCode, RequestError

RightName = Literal["infer", "admin", "metrics"]
RIGHTS: tuple[RightName, ...] = get_args(RightName)
KEY_PREFIX = "sk-omni-"
KEY_BYTES = 32
MAX_KEY_BYTES = 512
# How browsers' WebSockets, which cannot set headers, send a key to servers of this API.
SOCKET_PROTOCOL = b"openai-insecure-api-key."


class ApiKey(msgspec.Struct, frozen=True):
    """One line of a key file. `digest` is SHA-256 of the key."""

    digest: bytes
    rights: frozenset[RightName]
    name: str

    @property
    def salt(self) -> str:
        """What separates this key's prefix caches from those of others."""
        return self.digest.hex()[:16]


class KeyRing:
    """The keys of one server. Comparison takes the same time whichever key is given."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self.keys = tuple(keys)

    def find(self, key: bytes) -> ApiKey | None:
        """The entry of a key that a client gave; every entry is compared, so timing tells nothing."""
        digest = hashlib.sha256(key).digest()
        found: ApiKey | None = None
        for entry in self.keys:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        return found

    def admit(self, scope: Scope, right: RightName) -> ApiKey:
        """The key of a request that has the right. Raises RequestError, UNAUTHORIZED or FORBIDDEN."""
        given = key_of(scope)
        entry = self.find(given) if given else None
        if entry is None:
            what = "this API key is not known" if given else "send an API key as Authorization: Bearer KEY"
            raise RequestError(what, code=ErrorCode.UNAUTHORIZED)
        if right not in entry.rights:
            raise RequestError(f"this API key has not the scope {right}", code=ErrorCode.FORBIDDEN)
        return entry


def key_of(scope: Scope) -> bytes:
    """The key in a request's headers: a bearer token, the password of basic authentication, or a socket protocol.

    Basic authentication is what a browser offers for the pages; since browsers add it to requests that other sites
    cause, it counts only for requests that this server's own pages (or nobody's) caused.
    """
    headers: dict[bytes, bytes] = dict(scope["headers"])
    kind, _, value = headers.get(b"authorization", b"").partition(b" ")
    value = value.strip()
    if len(value) > 2 * MAX_KEY_BYTES:
        return b""
    if kind.lower() == b"bearer":
        return value
    if kind.lower() == b"basic" and headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin"):
        return _password(value)
    offered = (item.strip() for item in headers.get(b"sec-websocket-protocol", b"").split(b","))
    return next((item[len(SOCKET_PROTOCOL) :] for item in offered if item.startswith(SOCKET_PROTOCOL)), b"")


def _password(value: bytes) -> bytes:
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def read_keys(path: Path) -> KeyRing:
    """Reads a key file. Raises ConfigError naming the line at fault."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--api-keys {path}: cannot be read: {reason}", param="api_keys") from None
    rows = [(number, line.partition("#")[0].split()) for number, line in enumerate(lines, 1)]
    keys = [_entry(fields, f"--api-keys {path}, line {number}") for number, fields in rows if fields]
    if not keys:
        raise ConfigError(f"--api-keys {path}: no key in it; `omnistage keys` makes one", param="api_keys")
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError(f"--api-keys {path}: the same key stands on two lines", param="api_keys")
    return KeyRing(keys)


def _entry(fields: list[str], where: str) -> ApiKey:
    if len(fields) != 3:
        raise ConfigError(f"{where}: write <sha256> <scopes> <name>", param="api_keys")
    digest, scopes, name = fields
    try:
        raw = bytes.fromhex(digest)
    except ValueError:
        raw = b""
    if len(raw) != hashlib.sha256().digest_size:
        raise ConfigError(f"{where}: the first field is no SHA-256 in hex (never the key itself)", param="api_keys")
    rights = frozenset(right for right in RIGHTS if right in scopes.split(","))
    unknown = set(scopes.split(",")) - set(RIGHTS)
    if unknown:
        raise ConfigError(f"{where}: no scope {min(unknown)!r}; scopes are {', '.join(RIGHTS)}", param="api_keys")
    return ApiKey(raw, rights, name)


def new_key() -> tuple[str, str]:
    """A fresh key and its SHA-256 in hex."""
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return key, hashlib.sha256(key.encode()).hexdigest()
