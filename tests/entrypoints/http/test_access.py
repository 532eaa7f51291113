"""API keys: nothing is served without one, except what is open; scopes; owners see only what is theirs."""

from __future__ import annotations

import base64
import hashlib
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.cli.main import main
from omnistage.entrypoints.http.access import ApiKey, KeyRing, key_of, read_keys
from omnistage.entrypoints.http.app import create_app
from omnistage.entrypoints.http.routes import ROUTES
from omnistage.entrypoints.http.server import HttpServer, listen
from omnistage.errors import ConfigError
from tests.engines import running
from tests.entrypoints.http.fake_engine import FakeEngine

OPEN = {"/health", "/live", "/ready", "/version"}
CHAT = {"messages": [{"role": "user", "content": "a prompt that is long enough to fill blocks of the cache"}]}


def entry(key: str, *rights: str) -> ApiKey:
    return ApiKey(hashlib.sha256(key.encode()).digest(), frozenset(rights), key)  # type: ignore[arg-type]


RING = KeyRing([entry("alice", "infer"), entry("bob", "infer"), entry("ops", "admin"), entry("prom", "metrics")])


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def guarded(
    engine: FakeEngine | AsyncOmniEngine, keys: KeyRing | None = RING
) -> AsyncIterator[httpx.AsyncClient]:
    control = engine if isinstance(engine, AsyncOmniEngine) else None
    server = HttpServer(create_app(engine, keys=keys, control=control), listen("127.0.0.1", 0))
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.address[1]}", trust_env=False) as http:
        try:
            yield http
        finally:
            await server.close()


def path_of(pattern: str) -> str:
    return pattern.partition("{")[0] + ("x" if "{" in pattern else "")


async def test_exactly_the_probes_are_open_and_every_other_route_denies_a_stranger() -> None:
    engine = FakeEngine()
    async with guarded(engine) as http:
        for route in ROUTES:
            for headers in ({}, bearer("mallory"), {"authorization": "Bearer"}, {"authorization": "alice"}):
                answer = await http.request(route.method, path_of(route.path), headers=headers)
                expected = 200 if route.path in OPEN else 401
                assert (route.path, answer.status_code) == (route.path, expected)
                if expected == 401:
                    assert answer.json()["error"]["type"] == "authentication_error"
                    assert answer.json()["error"]["code"] == "unauthorized"
                    assert "Bearer" in answer.headers["www-authenticate"]
        for path in ("/nope", "//health", "/health/", "/HEALTH", "/health%2f", "/v1"):
            assert (await http.get(path)).status_code == 401
    assert not engine.requests


async def test_scope_decides_which_routes_a_key_opens() -> None:
    async with guarded(FakeEngine()) as http:
        for route in ROUTES:
            if route.path in OPEN:
                continue
            for key, right in (("alice", "infer"), ("ops", "admin"), ("prom", "metrics")):
                answer = await http.request(route.method, path_of(route.path), headers=bearer(key))
                assert (answer.status_code == 403) == (route.scope != right) or route.scope == "admin", route.path
                if answer.status_code == 403 and route.scope != right:
                    assert answer.json()["error"]["type"] == "permission_error"


async def test_admin_routes_are_closed_on_a_server_without_keys() -> None:
    async with guarded(FakeEngine(), None) as http:
        for route in ROUTES:
            if route.scope == "admin":
                assert (await http.request(route.method, route.path)).status_code == 403
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_websocket_without_a_key_is_refused_before_it_opens() -> None:
    async with guarded(FakeEngine()) as http:
        for path in ("/v1/realtime", "/live", "/"):
            headers = {
                "upgrade": "websocket",
                "connection": "upgrade",
                "sec-websocket-key": base64.b64encode(b"x" * 16).decode(),
                "sec-websocket-version": "13",
            }
            assert (await http.get(path, headers=headers)).status_code in (401, 403)


def scope_with(*headers: tuple[bytes, bytes]) -> dict[str, object]:
    return {"headers": list(headers)}


def test_key_is_read_from_bearer_basic_and_socket_protocol() -> None:
    basic = b"Basic " + base64.b64encode(b"any:alice")
    assert key_of(scope_with((b"authorization", b"bearer alice"))) == b"alice"
    assert key_of(scope_with((b"authorization", basic))) == b"alice"
    assert key_of(scope_with((b"authorization", basic), (b"sec-fetch-site", b"same-origin"))) == b"alice"
    offered = b"realtime, openai-insecure-api-key.alice"
    assert key_of(scope_with((b"sec-websocket-protocol", offered))) == b"alice"


@pytest.mark.parametrize("value", [b"", b"Bearer", b"Basic !!", b"Basic " + b"A" * 5000, b"Digest alice"])
def test_anything_else_is_no_key(value: bytes) -> None:
    assert key_of(scope_with((b"authorization", value))) == b""


def test_basic_authentication_does_not_count_for_requests_that_other_sites_cause() -> None:
    basic = (b"authorization", b"Basic " + base64.b64encode(b"any:alice"))
    for site in (b"cross-site", b"same-site"):
        assert key_of(scope_with(basic, (b"sec-fetch-site", site))) == b""


def test_keys_are_compared_in_constant_time_and_all_of_them() -> None:
    source = inspect.getsource(KeyRing.find)
    assert "compare_digest" in source
    assert "break" not in source
    assert "return entry" not in source
    assert RING.find(b"bob") is RING.keys[1]
    assert RING.find(b"bo") is None


async def test_owners_see_only_their_own_jobs_and_spoken_answers() -> None:
    app = create_app(FakeEngine(), keys=RING)
    alice, bob = (app.admit({"headers": [(b"authorization", b"Bearer " + k)]}, "infer") for k in (b"alice", b"bob"))
    assert alice.videos is not bob.videos
    assert alice.transcripts is not bob.transcripts
    assert alice.budget is bob.budget
    await app.close()


async def test_prefix_cache_is_shared_within_a_key_and_never_between_keys() -> None:
    async with running("echo3", {"placement": "inline"}) as engine, guarded(engine) as http:
        cached = []
        for key in ("alice", "alice", "bob", "bob"):
            body = {**CHAT, "modalities": ["text"]}
            answer = await http.post("/v1/chat/completions", json=body, headers=bearer(key))
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0


def test_key_made_by_the_command_opens_the_server_and_only_its_hash_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    assert main(["keys", "--file", str(file), "--scopes", "infer,metrics", "--name", "laptop"]) == 0
    key = capsys.readouterr().out.strip()
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    found = read_keys(file).find(key.encode())
    assert found is not None
    assert (found.name, sorted(found.rights)) == ("laptop", ["infer", "metrics"])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no key"),
        ("# only a comment\n", "no key"),
        ("sk-omni-plain infer me", "line 1"),
        ("00" * 32 + " infer", "line 1"),
        ("\n" + "00" * 32 + " root me", "line 2"),
        ("00" * 31 + " infer me", "line 1"),
        (("00" * 32 + " infer me\n") * 2, "two lines"),
    ],
)
def test_wrong_key_file_is_refused_by_line(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_keys(file)


def test_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none")
