"""The one fetcher of remote media. Off unless the configuration says otherwise.

A URL is parsed once, its host is resolved once, every address it resolves to must be public, and the connection goes to
the very address that was checked; each redirect is a new URL to which all of that applies again.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Callable
from urllib.parse import urljoin, urlsplit

import msgspec

from omnistage.config.model import MediaConfig
from omnistage.media.errors import refused, too_large

MAX_URL_CHARS = 2048
READ_BYTES = 1 << 16
PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_LABEL = r"(?!-)[a-z0-9-]{1,63}(?<!-)"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_PRINTABLE = re.compile(r"[!-\[\]-~]+")  # printable ASCII without blank and backslash
# Networks that carry an IPv4 address inside; the address within decides. RFC 6052, RFC 3056, RFC 4380.
_EMBEDDING = tuple(ipaddress.IPv6Network(net) for net in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], list[str]]


class Target(msgspec.Struct, frozen=True):
    """A URL in its parts; `path` includes the query."""

    scheme: str
    host: str
    port: int
    path: str


def is_public(address: Address) -> bool:
    """True for an address of the public internet, also inside addresses that embed one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if any(address in network for network in _EMBEDDING):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def parse_target(url: str, param: str) -> Target:
    """Raises RequestError unless the URL is plain http or https on its usual port, in one reading only."""
    if len(url) > MAX_URL_CHARS or not _PRINTABLE.fullmatch(url):
        raise refused("the URL is too long or has characters that a URL must escape", param)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise refused("not a valid URL", param) from None
    if parts.scheme not in PORTS or "@" in parts.netloc or parts.hostname is None:
        raise refused("only http and https URLs without user and password are fetched", param)
    if port not in (None, PORTS[parts.scheme]):
        raise refused("only the ports 80 (http) and 443 (https) are fetched from", param)
    host = _checked_host(parts.hostname, bracketed=parts.netloc.startswith("["), param=param)
    query = f"?{parts.query}" if parts.query else ""
    return Target(parts.scheme, host, PORTS[parts.scheme], f"{parts.path or '/'}{query}")


def _checked_host(host: str, *, bracketed: bool, param: str) -> str:
    """A name, or an address in its one usual form: 127.1, 0x7f000001 and 2130706433 are no names."""
    if bracketed and "%" not in host:
        try:
            return str(ipaddress.IPv6Address(host))
        except ValueError:
            raise refused("not a valid host", param) from None
    last = host.rstrip(".").rpartition(".")[2]
    if last.isdigit() or last.startswith("0x"):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise refused("not a valid host", param) from None
    if not _NAME.fullmatch(host) or len(host) > 253:
        raise refused("not a valid host", param)
    return host


def resolve_host(host: str, port: int) -> list[str]:
    """The addresses of a host name. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(row[4][0]) for row in found))


class Fetcher:
    """Fetches under the bounds of `MediaConfig`. `resolve`, `allowed` and `ports` are there for tests."""

    def __init__(
        self,
        config: MediaConfig,
        *,
        resolve: Resolve = resolve_host,
        allowed: Callable[[Address], bool] = is_public,
        ports: dict[str, int] | None = None,
    ) -> None:
        self._config = config
        self._resolve = resolve
        self._allowed = allowed
        self._ports = ports or PORTS

    def fetch(self, url: str, max_bytes: int, param: str) -> bytes:
        """The body of a URL, at most `max_bytes`. Blocking. Raises RequestError naming `param`."""
        if not self._config.remote:
            raise refused("remote URLs are not fetched by this server; send a data: URL with base64 content", param)
        deadline = time.monotonic() + self._config.fetch_timeout_s
        for _ in range(self._config.max_redirects + 1):
            target = parse_target(url, param)
            try:
                found = self._get(target, (max_bytes, deadline), param)
            except (OSError, http.client.HTTPException, ValueError):
                raise refused("the URL could not be fetched", param) from None
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise refused(f"more than {self._config.max_redirects} redirects", param)

    def _get(self, target: Target, bounds: tuple[int, float], param: str) -> bytes | str:
        """The body, or where a redirect leads."""
        connection = http.client.HTTPConnection(target.host, target.port)
        with self._connect(target, bounds[1], param) as sock:
            connection.sock = sock
            headers = {"accept-encoding": "identity", "connection": "close", "user-agent": "omnistage"}
            connection.request("GET", target.path, headers=headers)
            with connection.getresponse() as response:
                return _outcome(response, sock, bounds, param)

    def _connect(self, target: Target, deadline: float, param: str) -> socket.socket:
        """A connection to an address that was checked, and to no other."""
        hosts = self._config.remote_hosts
        if hosts and target.host not in hosts:
            raise refused("this server does not fetch from that host", param)
        addresses = self._resolve(target.host, target.port)
        if not addresses or not all(self._allowed(ipaddress.ip_address(each)) for each in addresses):
            raise refused("the URL leads to an address that is not public", param)
        port = self._ports[target.scheme]
        sock = socket.create_connection((addresses[0], port), timeout=_left(deadline))
        if target.scheme == "http":
            return sock
        try:
            return ssl.create_default_context().wrap_socket(sock, server_hostname=target.host)
        except (OSError, ValueError):
            sock.close()
            raise


def _outcome(
    response: http.client.HTTPResponse, sock: socket.socket, bounds: tuple[int, float], param: str
) -> bytes | str:
    location = response.headers.get("location", "")
    if response.status in _REDIRECTS and location:
        return location
    if response.status != 200:
        raise refused("the URL did not answer with 200", param)
    if response.headers.get("content-encoding", "identity") != "identity":
        raise refused("the URL answered with a content encoding that was not asked for", param)
    return _read(response, sock, bounds, param)


def _read(response: http.client.HTTPResponse, sock: socket.socket, bounds: tuple[int, float], param: str) -> bytes:
    """The body, counted while it arrives."""
    max_bytes, deadline = bounds
    if (response.length or 0) > max_bytes:
        raise too_large(f"more than {max_bytes} bytes", param)
    parts, count = list[bytes](), 0
    while True:
        sock.settimeout(_left(deadline))
        piece = response.read1(READ_BYTES)
        if not piece:
            break
        count += len(piece)
        if count > max_bytes:
            raise too_large(f"more than {max_bytes} bytes", param)
        parts.append(piece)
    if response.length:
        raise refused("the URL's answer ended too early", param)
    return b"".join(parts)


def _left(deadline: float) -> float:
    """Seconds left. Raises TimeoutError when none are."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
