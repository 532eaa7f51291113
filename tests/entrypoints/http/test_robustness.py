"""What clients do wrong: sizes, lies, silence, slowness, going away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from omnistage.entrypoints.http.protocol import GuardedProtocol
from omnistage.entrypoints.http.state import HttpOptions
from omnistage.request import OmniRequest, OmniRequestOutput
from tests.entrypoints.http.conftest import Running, Start
from tests.entrypoints.http.fake_engine import FakeEngine, Media, audio_event, last_event, speech_of, text_event

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
MIB = 1 << 20


async def endless(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
    """A word every time the loop comes round, for ever."""
    seq = 0
    while True:
        yield text_event(request, "word " * 50, seq)
        seq += 1
        await asyncio.sleep(0)


async def stuck(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
    await asyncio.Event().wait()
    yield last_event(request)


class Wire:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, server: Running) -> Wire:
        return cls(*await asyncio.open_connection(*server.server.address))

    async def send(self, head: str, body: bytes = b"", path: str = "/v1/chat/completions") -> None:
        text = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{head}\r\n"
        self.writer.write(text.encode() + body)
        await self.writer.drain()

    async def send_json(self, body: dict, path: str = "/v1/chat/completions") -> None:
        data = json.dumps(body).encode()
        await self.send(f"content-length: {len(data)}\r\n", data, path)

    async def status(self) -> int:
        return int((await asyncio.wait_for(self.reader.readline(), 10)).split()[1])

    def cut(self) -> None:
        self.writer.transport.abort()


async def wait_until_idle(engine: FakeEngine) -> None:
    async with asyncio.timeout(5):
        await engine.idle.wait()


@pytest.mark.parametrize("chunked", [False, True])
async def test_oversized_body_is_413(start: Start, chunked: bool) -> None:
    server = await start(FakeEngine(max_body_mb=1))

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * (MIB // 8)

    content = pieces() if chunked else b" " * (MIB + 1)
    answer = await server.http.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["param"] == "body"
    assert answer.json()["error"]["code"] == "payload_too_large"
    assert (await server.http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_body_of_exactly_the_limit_is_read(start: Start) -> None:
    server = await start(FakeEngine(max_body_mb=1))
    body = json.dumps(CHAT).encode()
    headers = {"content-type": "application/json"}
    answer = await server.http.post("/v1/chat/completions", content=body.ljust(MIB), headers=headers)
    assert answer.status_code == 200


async def test_content_length_above_the_limit_is_refused_before_any_byte(start: Start) -> None:
    server = await start(FakeEngine(max_body_mb=1))
    wire = await Wire.open(server)
    await wire.send("content-length: 99999999999\r\n")
    assert await wire.status() == 413
    wire.cut()


async def test_endless_chunked_body_is_cut_off(start: Start) -> None:
    server = await start(FakeEngine(max_body_mb=1))
    wire = await Wire.open(server)
    await wire.send("transfer-encoding: chunked\r\n")
    sent = 0
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):  # noqa: PT012
        while sent < 64 * MIB:
            wire.writer.write(b"10000\r\n" + b" " * 65_536 + b"\r\n")
            await wire.writer.drain()
            sent += 65_536
        await wire.reader.readexactly(1 << 20)
    assert sent < 16 * MIB


async def test_content_length_that_promises_more_than_comes_ends_with_the_timeout(start: Start) -> None:
    server = await start(options=HttpOptions(body_idle_timeout_s=0.2))
    wire = await Wire.open(server)
    await wire.send("content-length: 500\r\n", b"{")
    assert await wire.status() == 400
    wire.cut()


@pytest.mark.parametrize("head", ["content-length: -5\r\n", "content-length: 5\r\ncontent-length: 6\r\n"])
async def test_nonsense_content_length_is_400(server: Running, head: str) -> None:
    wire = await Wire.open(server)
    await wire.send(head, b"{}")
    assert await wire.status() == 400
    wire.cut()


async def test_bytes_in_flight_are_bounded_over_all_requests(start: Start) -> None:
    server = await start(FakeEngine(max_body_mb=1), HttpOptions(bodies_in_flight=2))
    wires = [await Wire.open(server) for _ in range(3)]
    for wire in wires:
        await wire.send(f"content-length: {MIB}\r\n", b" " * (MIB - 1))
    statuses = {asyncio.ensure_future(wire.status()) for wire in wires}
    done, waiting = await asyncio.wait(statuses, return_when=asyncio.FIRST_COMPLETED, timeout=5)
    assert {task.result() for task in done} == {429}  # two, where the second is read before the first gives back
    assert waiting
    for task in waiting:
        task.cancel()
    for wire in wires:
        wire.cut()


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"nope", "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b"\xff\xfe", "body"),
        (b'{"messages":' + b"[" * 100_000, "messages[0]"),
        (b'{"metadata":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", "metadata[...]"),
        (b'{"sampling":{"thinker":{"a":' + b"[" * 100_000, "body"),
        (b'{"seed": 1e400, "messages": []}', "seed"),
        (b'{"seed": NaN}', "body"),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "body"),
    ],
)
async def test_malformed_json_is_400(server: Running, content: bytes, param: str) -> None:
    headers = {"content-type": "application/json"}
    answer = await server.http.post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_wrong_content_type_is_400(server: Running, kind: str) -> None:
    answer = await server.http.post("/v1/chat/completions", content=b"{}", headers={"content-type": kind})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "content-type"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_client_that_leaves_aborts_the_engine_request_at_once(start: Start, stream: bool, n: int) -> None:
    engine = FakeEngine(endless if stream else stuck)
    server = await start(engine)
    wire = await Wire.open(server)
    await wire.send_json({**CHAT, "stream": stream, "n": n})
    while engine.yielded < 3 * n if stream else len(engine.live) < n:
        await asyncio.sleep(0.01)
    wire.cut()
    await wait_until_idle(engine)
    assert sorted(engine.closed_early) == sorted(request.id for request in engine.requests)
    assert len(engine.requests) == n
    text = (await server.http.get("/metrics")).text
    assert "omnistage_http_disconnects_total 1.0" in text


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/completions"])
async def test_client_that_leaves_other_routes_aborts_too(start: Start, path: str) -> None:
    engine = FakeEngine(stuck)
    server = await start(engine)
    wire = await Wire.open(server)
    await wire.send_json({"input": "x"} if "speech" in path else {"prompt": "x"}, path)
    while not engine.live:
        await asyncio.sleep(0.01)
    wire.cut()
    await wait_until_idle(engine)


async def test_hundred_random_disconnects_leave_nothing(start: Start) -> None:
    engine = FakeEngine(endless)
    server = await start(engine)
    for round_number in range(100):
        wire = await Wire.open(server)
        body = {**CHAT, "stream": True, "n": 1 + round_number % 3, "modalities": ["text", "audio"]}
        await wire.send_json(body)
        if round_number % 4:
            await wire.reader.read(10 * round_number + 1)
        wire.cut()
    assert await server.server.drain(10)
    assert not engine.live
    assert len(engine.closed_early) == len(engine.requests)


async def test_slow_reader_holds_the_engine_back(start: Start) -> None:
    engine = FakeEngine(endless)
    server = await start(engine)
    wire = await Wire.open(server)
    await wire.send_json({**CHAT, "stream": True})
    before = await settled(engine)
    (connection,) = server.server._server.server_state.connections
    assert connection.transport.get_write_buffer_size() < 256 * 1024
    for _ in range(200):
        await wire.reader.read(1 << 16)
    assert engine.yielded > before
    wire.cut()
    await wait_until_idle(engine)


async def settled(engine: FakeEngine) -> int:
    """Events that the engine was asked for until nothing more is asked."""
    async with asyncio.timeout(20):
        previous = -1
        while engine.yielded != previous or previous == 0:
            previous = engine.yielded
            await asyncio.sleep(0.3)
    return engine.yielded


async def test_other_clients_go_on_beside_a_slow_reader(start: Start) -> None:
    async def long_speech(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        for seq in range(200):
            yield audio_event(request, speech_of(8), seq)
        yield last_event(request)

    server = await start(FakeEngine(long_speech))
    wire = await Wire.open(server)
    await wire.send_json({"input": "x", "response_format": "wav"}, "/v1/audio/speech")
    await asyncio.sleep(0.1)
    answer = await server.http.post("/v1/audio/speech", json={"input": "x", "response_format": "pcm"})
    assert len(answer.content) == 200 * 8 * 12_000
    wire.cut()


async def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    wire = await Wire.open(server)
    for _ in range(3):
        await wire.send_json(CHAT)
    text = b""
    while text.count(b"chat.completion") < 3:
        text += await asyncio.wait_for(wire.reader.read(65_536), 5)
    assert text.count(b"HTTP/1.1 200") == 3
    wire.cut()


async def test_drain_lets_running_requests_finish_and_takes_no_new_ones(start: Start) -> None:
    go_on = asyncio.Event()

    async def waits(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
        yield text_event(request, "Hello")
        await go_on.wait()
        yield last_event(request)

    server = await start(FakeEngine(waits))
    running = asyncio.ensure_future(server.http.post("/v1/chat/completions", json=CHAT))
    while not server.engine.live:
        await asyncio.sleep(0.01)
    server.server.stop_accepting()
    with pytest.raises(OSError):
        await Wire.open(server)
    assert not await server.server.drain(0.05)
    go_on.set()
    assert await server.server.drain(5)
    assert (await running).json()["choices"][0]["message"]["content"] == "Hello"


async def test_forced_close_ends_requests_with_an_error_and_aborts_them(start: Start) -> None:
    server = await start(FakeEngine(stuck))
    streaming = await start(FakeEngine(endless))
    whole = asyncio.ensure_future(server.http.post("/v1/chat/completions", json=CHAT))
    wire = await Wire.open(streaming)
    await wire.send_json({**CHAT, "stream": True})
    await wire.reader.read(10)
    while not server.engine.live:
        await asyncio.sleep(0.01)
    await server.server.close()
    answer = await whole
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "stage_unavailable"
    await streaming.server.close()
    assert not server.engine.live
    assert not streaming.engine.live
    wire.cut()


async def test_endless_request_head_is_cut_off(server: Running) -> None:
    wire = await Wire.open(server)
    wire.writer.write(b"GET /health HTTP/1.1\r\nx-long: ")
    with pytest.raises(ConnectionError):  # noqa: PT012
        for _ in range(1000):
            wire.writer.write(b"y" * 65_536)
            await wire.writer.drain()
            await asyncio.sleep(0)
    wire.cut()
    assert (await server.http.get("/health")).status_code == 200


async def test_head_that_never_ends_is_closed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "head_timeout_s", 0.1)
    for opening in (b"", b"GET /health HTTP/1.1\r\nx: y\r\n"):
        wire = await Wire.open(server)
        wire.writer.write(opening)
        assert await asyncio.wait_for(wire.reader.read(), 5) == b""
        wire.cut()


async def test_connection_stays_open_between_requests(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "head_timeout_s", 0.1)
    wire = await Wire.open(server)
    for _ in range(2):
        await wire.send_json(CHAT)
        answer = await asyncio.wait_for(wire.reader.read(65_536), 5)
        assert answer.startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.2)
    wire.cut()


async def test_unknown_websocket_is_refused(server: Running) -> None:
    wire = await Wire.open(server)
    upgrade = "GET /v1/other HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
    wire.writer.write(
        f"{upgrade}sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n".encode()
    )
    assert await wire.status() == 404
    wire.cut()
