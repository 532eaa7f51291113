"""Every error body that can be had: from the closed set of codes, without paths, addresses, reprs or tracebacks."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

import omnistage.errors
from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.http.access import KeyRing
from omnistage.entrypoints.http.app import create_app
from omnistage.entrypoints.http.routes import ROUTES
from omnistage.entrypoints.http.server import HttpServer, listen
from omnistage.errors import HTTP_STATUS, ErrorCode, OmniError
from omnistage.request import OmniRequest, OmniRequestOutput
from tests.entrypoints.http.fake_engine import FakeEngine, Media
from tests.entrypoints.http.real import Running, serving_engine

SECRET = "/home/somebody/secrets.txt"
# What no client may learn: absolute paths, addresses in memory, reprs of objects, names of Python, traces.
TELLING = re.compile(
    r"/home/|/usr/|/work/|/tmp/|/root/|0x[0-9a-f]{4,}|<[\w.]+ object|object at|Traceback|File \"|line \d+, in|"
    r"\w+Error\b|\w+Exception\b|msgspec|omnistage\.\w|NoneType|Struct\b|\.py\b"
)
CODES = {code.value for code in ErrorCode}

BAD: list[tuple[str, dict[str, str], bytes]] = [
    ("nothing", {}, b""),
    ("half an object", {}, b"{"),
    ("null", {}, b"null"),
    ("a list", {}, b"[1, 2]"),
    ("a number", {}, b"1e999"),
    ("no utf-8", {}, b'{"model": "\xff\xfe"}'),
    ("deep", {}, b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}"),
    ("unknown field", {}, b'{"surprise": 1}'),
    ("wrong types", {}, b'{"model": 5, "messages": {}, "prompt": 7, "input": [], "stage": 1, "size": {}, "n": "x"}'),
    ("wrong values", {}, b'{"model": "nobody", "messages": [], "prompt": "", "input": "", "stage": "nowhere"}'),
    ("huge numbers", {}, b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 9999999999999999999999}'),
    ("lone surrogate", {}, b'{"messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\ud800"}'),
    ("roles", {}, b'{"messages": [{"role": "emperor", "content": "x"}]}'),
    ("local file", {}, b'{"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": '
     b'{"data": "/home/somebody/secrets.txt", "format": "wav"}}]}]}'),
    ("file url", {}, b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": '
     b'{"url": "file:///home/somebody/secrets.txt"}}]}]}'),
    ("no media", {}, b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": '
     b'{"url": "data:image/png;base64,AAAA"}}]}]}'),
    ("bad sampling", {}, b'{"messages": [{"role": "user", "content": "x"}], "sampling": {"thinker": {"top_p": 9}}}'),
    ("bad stage", {}, b'{"messages": [{"role": "user", "content": "x"}], "sampling": {"nobody": {}}}'),
    ("form without boundary", {"content-type": "multipart/form-data"}, b"x"),
    ("broken form", {"content-type": "multipart/form-data; boundary=b"}, b"--b\r\nContent-Disposition: nonsense"),
    ("file that is none", {"content-type": "multipart/form-data; boundary=b"},
     b'--b\r\nContent-Disposition: form-data; name="file"; filename="../../x.wav"\r\n\r\nRIFF\r\n--b--\r\n'),
    ("other type", {"content-type": "application/x-python-serialize"}, b"\x80\x04."),
]  # fmt: skip


def check(reply: httpx.Response, sent: str) -> None:
    """An error is a JSON object with a code of the set, and tells nothing about the server."""
    if reply.status_code < 400:
        return
    error: dict[str, Any] = reply.json()["error"]
    assert error["code"] in CODES, (sent, error)
    assert reply.status_code == HTTP_STATUS[ErrorCode(error["code"])] or reply.status_code in (405, 411), (sent, error)
    assert set(error) <= {"message", "type", "param", "code", "stage"}, sent
    assert error["message"], sent
    found = TELLING.search(json.dumps(error))
    assert found is None, (sent, error)


@asynccontextmanager
async def answered_by(engine: FakeEngine, keys: KeyRing | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server around a fake engine."""
    server = HttpServer(create_app(engine, keys=keys), listen("127.0.0.1", 0))
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.address[1]}", trust_env=False) as http:
        yield http
    await server.close()


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    config = resolve_config("echo3", None, {"placement": "inline", "media.decode_processes": 0})
    async with AsyncOmniEngine(config) as engine, serving_engine(engine) as running:
        yield running


@pytest.mark.slow
async def test_bad_input_on_every_route_gets_an_error_that_tells_nothing(server: Running) -> None:
    errors = 0
    for route in ROUTES:
        for name, headers, content in BAD if route.method != "GET" else BAD[:2]:
            path = re.sub(r"\{\w+\}", "..%2f..%2fetc%2fpasswd", route.path)
            typed = {"content-type": "application/json"} | headers
            reply = await server.http.request(route.method, path, content=content, headers=typed)
            assert reply.status_code < 500, (route.path, name)
            check(reply, f"{route.method} {route.path}: {name}")
            errors += reply.status_code >= 400
    assert errors > 0.5 * len(BAD) * sum(route.method == "POST" for route in ROUTES)


@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS", "GET", "POST", "DELETE"])
async def test_wrong_methods_and_paths_get_one_too(server: Running, method: str) -> None:
    for path in ("/v1/chat/completions", "/v1/nothing", "/health", "/..%2f..%2fetc/passwd", "/admin/stages", "/%00"):
        check(await server.http.request(method, path), f"{method} {path}")


async def test_every_code_of_the_engine_keeps_its_status_and_its_text() -> None:
    for code in ErrorCode:

        async def fail(request: OmniRequest, media: Media, code: ErrorCode = code) -> AsyncIterator[OmniRequestOutput]:
            raise OmniError("the thing is at fault", code=code, stage="thinker", retry_after_s=2.0)
            yield

        async with answered_by(FakeEngine(fail)) as http:
            reply = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        check(reply, code)
        assert reply.json()["error"]["code"] == code


DEFECTS = [
    RuntimeError(SECRET),
    OSError(2, "No such file", SECRET),
    KeyError("<object at 0x7f0011223344>"),
    ValueError("Traceback (most recent call last)"),
    AssertionError(SECRET),
    MemoryError(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, SECRET),
    RecursionError(SECRET),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: type(defect).__name__)
async def test_defect_of_the_server_says_only_that_there_is_one(defect: Exception) -> None:
    async def fail(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        raise defect
        yield

    async with answered_by(FakeEngine(fail)) as http:
        reply = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    check(reply, type(defect).__name__)
    assert reply.json()["error"]["code"] == "internal_error"


@pytest.mark.slow
async def test_refusals_for_lack_of_a_key_say_nothing_more() -> None:
    async with answered_by(FakeEngine(), keys=KeyRing([])) as http:
        for route in ROUTES:
            for headers in ({}, {"authorization": "Bearer nonsense"}, {"authorization": "Basic !!"}):
                reply = await http.request(route.method, route.path, headers=headers)
                check(reply, f"{route.method} {route.path}")
                assert route.scope == "open" or reply.status_code == 401


def test_every_error_class_has_a_code_of_the_set_and_a_status() -> None:
    classes = [value for _, value in inspect.getmembers(omnistage.errors, inspect.isclass)]
    kinds = [each for each in classes if issubclass(each, OmniError)]
    assert len(kinds) >= 4
    assert all(kind("x").info.code in ErrorCode for kind in kinds)
    assert HTTP_STATUS.keys() == set(ErrorCode)
