"""Where media may come from: nothing remote unless allowed, public addresses only, one folder only."""

from __future__ import annotations

import ipaddress
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from omnistage.config.model import MediaConfig
from omnistage.errors import ErrorCode, RequestError
from omnistage.media.fetch import Fetcher, is_public, parse_target
from omnistage.media.files import read_file_url
from omnistage.media.source import MediaSource

ON = MediaConfig(remote=True, fetch_timeout_s=2)


class Site(BaseHTTPRequestHandler):
    """/ok gives bytes, /to?URL redirects there, /big promises or streams too much, /short ends early."""

    def do_GET(self) -> None:
        if self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("location", self.path[4:])
            self.end_headers()
            return
        self.send_response(200)
        if self.path == "/short":
            self.send_header("content-length", "10")
        if self.path == "/huge":
            self.send_header("content-length", str(1 << 40))
        if self.path == "/packed":
            self.send_header("content-encoding", "gzip")
        self.end_headers()
        self.wfile.write(b"x" * (5000 if self.path == "/big" else 4))

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def site() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def local(port: int, config: MediaConfig = ON, allow: bool = True) -> Fetcher:
    """A fetcher for which every name is the test's site, whose address passes if `allow`."""
    checked = (lambda address: True) if allow else is_public
    return Fetcher(config, resolve=lambda host, _: ["127.0.0.1"], allowed=checked, ports={"http": port, "https": port})


def refusal(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(RequestError) as refused:
        fetcher.fetch(url, 1000, "url")
    assert refused.value.info.param == "url"
    return refused.value.info.message


def test_allowed_url_is_fetched_and_redirects_are_followed(site: int) -> None:
    assert local(site).fetch("http://example.org/ok", 1000, "url") == b"xxxx"
    assert local(site).fetch("http://example.org/to?http://example.com/ok", 1000, "url") == b"xxxx"
    assert local(site).fetch("http://example.org/to?/ok", 1000, "url") == b"xxxx"


def test_nothing_is_fetched_by_default() -> None:
    asked: list[str] = []
    fetcher = Fetcher(MediaConfig(), resolve=lambda host, _: asked.append(host) or [])  # type: ignore[func-returns-value]
    assert "not fetched by this server" in refusal(fetcher, "http://example.org/ok")
    assert asked == []


def test_body_beyond_the_limit_is_refused_from_the_header_and_while_reading(site: int) -> None:
    for path in ("/big", "/huge"):
        with pytest.raises(RequestError) as refused:
            local(site).fetch(f"http://example.org{path}", 1000, "url")
        assert refused.value.info.code == ErrorCode.TOO_LARGE


def test_answer_that_ends_early_or_is_packed_is_refused(site: int) -> None:
    assert "ended too early" in refusal(local(site), "http://example.org/short")
    assert "encoding" in refusal(local(site), "http://example.org/packed")


def test_redirects_end(site: int) -> None:
    url = "http://example.org/to?" * 5 + "http://example.org/ok"
    assert "redirects" in refusal(local(site, MediaConfig(remote=True, max_redirects=2)), url)


@pytest.mark.parametrize(
    "target", ["http://169.254.169.254/x", "http://[::1]/", "file:///etc/passwd", "gopher://x/", "data:,x"]
)
def test_redirect_is_checked_like_a_first_url(site: int, target: str) -> None:
    fetcher = Fetcher(
        ON,
        resolve=lambda host, _: ["127.0.0.1"] if host == "example.org" else [host],
        allowed=lambda address: address == ipaddress.ip_address("127.0.0.1") or is_public(address),
        ports={"http": site, "https": site},
    )
    assert "http://" not in refusal(fetcher, f"http://example.org/to?{target}")


def test_name_that_resolves_to_a_private_address_is_refused_whatever_else_it_resolves_to(site: int) -> None:
    for addresses in (["127.0.0.1"], ["1.1.1.1", "10.0.0.1"], ["::ffff:169.254.169.254"], ["fe80::1%2"], []):
        fetcher = Fetcher(ON, resolve=lambda host, _, found=addresses: found)  # type: ignore[misc]
        assert refusal(fetcher, "http://example.org/")


def test_address_is_resolved_once_so_that_a_name_cannot_flip(site: int) -> None:
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    seen: list[str] = []

    def allowed(address: object) -> bool:
        seen.append(str(address))
        return True

    fetcher = Fetcher(ON, resolve=lambda host, _: next(answers), allowed=allowed, ports={"http": site})
    assert fetcher.fetch("http://flips.example/ok", 100, "url") == b"xxxx"
    assert seen == ["127.0.0.1"]


def test_only_named_hosts_when_any_are_named(site: int) -> None:
    config = MediaConfig(remote=True, remote_hosts=("media.example",))
    assert local(site, config).fetch("http://media.example/ok", 100, "url") == b"xxxx"
    assert "does not fetch from that host" in refusal(local(site, config), "http://other.example/ok")


BAD_URLS = [
    "http://user@example.org/", "http://a:b@example.org/", "http://example.org:8080/", "http://example.org:22/",
    "https://example.org:80/", "http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/", "http://127.1/",
    "http://1.2.3/", "http://127.0.0.1.0x1/", "http://exa mple.org/", "http://example.org\\@evil.org/",
    "http://example.org/\r\nhost: x", "http://example.org/\x00", "http://ex\u00e4mple.org/", "http:///x", "http://",
    "ftp://example.org/", "//example.org/", "http://[::1/", "http://[::1%25lo]/", "http://-a.org/", "http://a..b/",
    "http://example.org:99999/", "http://" + "a" * 64 + ".org/", "http://example.org/" + "a" * 3000, "http://exam_ple/",
    "HTTP//x", "http://%31%32%37.0.0.1/",
]  # fmt: skip


@pytest.mark.parametrize("url", BAD_URLS)
def test_url_with_two_readings_or_an_odd_part_is_refused_before_any_lookup(url: str) -> None:
    with pytest.raises(RequestError):
        parse_target(url, "url")


PRIVATE = [
    "127.0.0.1", "127.255.255.254", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1",
    "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1", "::", "::1", "fe80::1", "fc00::1",
    "fd12::1",
    "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:db8::1", "2001:0:1::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_address_that_is_not_public_is_known(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


def test_public_addresses_pass() -> None:
    for address in ("1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1"):
        assert is_public(ipaddress.ip_address(address))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "media"
    (root / "deep").mkdir(parents=True)
    (root / "a.wav").write_bytes(b"sound")
    (root / "deep" / "b c.wav").write_bytes(b"more")
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "out").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    return root


def test_file_below_the_folder_is_read(folder: Path) -> None:
    assert read_file_url(f"file://{folder}/a.wav", str(folder), 100, "url") == b"sound"
    assert read_file_url(f"file://localhost{folder}/deep/b%20c.wav", str(folder), 100, "url") == b"more"
    assert MediaSource(MediaConfig(file_root=str(folder))).read(f"file://{folder}/a.wav", 100, "url") == b"sound"


@pytest.mark.parametrize(
    "tail", ["../secret", "deep/../../secret", "%2e%2e/secret", "link", "out/secret", "pipe", "deep", "", "/a.wav",
             "nope",             "a.wav%00", "a.wav?x", "a.wav#x", "./a.wav", "a.wav/"]
)  # fmt: skip
def test_nothing_but_plain_files_below_the_folder_is_read(folder: Path, tail: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_file_url(f"file://{folder}/{tail}", str(folder), 100, "url")
    assert str(folder) not in refused.value.info.message


def test_file_urls_are_off_by_default_and_bounded(folder: Path) -> None:
    for url in (f"file://{folder}/a.wav", "file:///etc/passwd", "file:a.wav"):
        with pytest.raises(RequestError, match="not read by this server"):
            MediaSource(MediaConfig()).read(url, 100, "url")
    with pytest.raises(RequestError) as refused:
        read_file_url(f"file://{folder}/a.wav", str(folder), 4, "url")
    assert refused.value.info.code == ErrorCode.TOO_LARGE
    with pytest.raises(RequestError):
        read_file_url(f"file://evil.example{folder}/a.wav", str(folder), 100, "url")
