"""What the HTTP front costs: server CPU per chat request and per streamed event, over an engine that costs nothing.

python -m bench.http
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from statistics import median

import psutil
import uvloop

from bench.report import machine, table
from omnistage.config.model import OmniConfig, PipelineConfig, TraceConfig
from omnistage.config.registry import load_pipeline
from omnistage.config.resolve import resolve_config
from omnistage.engine.client import Health
from omnistage.engine.timeline import Timelines
from omnistage.entrypoints.http.app import create_app
from omnistage.entrypoints.http.server import HttpServer, listen
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason, OmniRequest, OmniRequestOutput, RequestMetrics

REQUESTS = 3000
EVENTS = 500
STREAMS = 64
STREAM_SECONDS = 5.0
EVENTS_PER_SECOND = 40
ROUNDS = 5


class InstantEngine:
    """An `EngineClient` whose answers cost nothing: `max_tokens` text events, paced if the prompt says "paced"."""

    def __init__(self) -> None:
        self.config: OmniConfig = resolve_config("echo3")
        self.pipeline: PipelineConfig = load_pipeline("echo3")
        self.timelines = Timelines(TraceConfig(enabled=False))

    async def generate(
        self, request: OmniRequest, media: dict[str, MultimodalPayload] | None = None
    ) -> AsyncIterator[OmniRequestOutput]:
        paced = "paced" in str(request.messages)
        for seq in range(request.sampling.get("", {}).get("max_tokens", 1)):
            if paced:
                await asyncio.sleep(1 / EVENTS_PER_SECOND)
            yield OmniRequestOutput(
                request_id=request.id, stage="thinker", modality="text", seq=seq, text="word ", token_ids=(seq,)
            )
        yield OmniRequestOutput(
            request_id=request.id, finished=True, finish_reason=FinishReason.STOP, seed=1, metrics=RequestMetrics()
        )

    async def abort(self, request_id: str) -> bool:
        return False

    def health(self) -> Health:
        return Health(ready=True, healthy=True, draining=False, replicas=[])

    def render_metrics(self) -> bytes:
        return b""


def serve(pipe: Connection) -> None:
    async def run() -> None:
        server = HttpServer(create_app(InstantEngine()), listen("127.0.0.1", 0))
        await server.start()
        pipe.send(server.address[1])
        await asyncio.Event().wait()

    uvloop.run(run())


def body(tokens: int, stream: bool, prompt: str = "hello") -> bytes:
    data = (
        f'{{"messages": [{{"role": "user", "content": "{prompt}"}}], "max_completion_tokens": {tokens}, '
        f'"stream": {str(stream).lower()}}}'
    ).encode()
    lines = ("POST /v1/chat/completions HTTP/1.1", "host: x", "content-type: application/json")
    return "\r\n".join((*lines, f"content-length: {len(data)}", "", "")).encode() + data


async def whole(port: int, count: int) -> None:
    """Requests one after the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    message = body(1, False)
    for _ in range(count):
        writer.write(message)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(length)
    writer.close()


async def streamed(port: int, tokens: int, prompt: str = "hello") -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    writer.write(body(tokens, True, prompt))
    await reader.readuntil(b"data: [DONE]")
    writer.close()


async def measure(port: int, server: psutil.Process) -> list[tuple[str, str]]:
    def cpu() -> float:
        times = server.cpu_times()
        return float(times.user + times.system)

    await whole(port, 300)
    requests, events, shares = [], [], []
    for _ in range(ROUNDS):
        start = cpu()
        await whole(port, REQUESTS)
        requests.append((cpu() - start) / REQUESTS)
        start = cpu()
        for _ in range(10):
            await streamed(port, EVENTS)
        events.append((cpu() - start) / (10 * EVENTS))
    tokens = int(STREAM_SECONDS * EVENTS_PER_SECOND)
    for _ in range(2):
        start, began = cpu(), time.perf_counter()
        await asyncio.gather(*(streamed(port, tokens, "paced") for _ in range(STREAMS)))
        shares.append((cpu() - start) / (time.perf_counter() - began))
    return [
        ("server CPU per chat request", f"{median(requests) * 1e6:.0f} us"),
        ("server CPU per streamed event", f"{median(events) * 1e6:.1f} us"),
        (f"{STREAMS} streams at {EVENTS_PER_SECOND} events/s", f"{median(shares):.0%} of a core"),
    ]


def main() -> None:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    child.start()
    port = int(ours.recv())
    print(machine() + "\n")
    print(table(("HTTP front", "figure"), asyncio.run(measure(port, psutil.Process(child.pid)))))
    child.terminate()


if __name__ == "__main__":
    main()
