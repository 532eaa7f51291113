"""Ten thousand requests of clients that finish, hang up at any moment, cancel or read slowly: nothing stays held."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from statistics import median

import psutil
import pytest

from tests.reliability.soak import MAX_GROWTH
from tests.servers import Server, serving

REQUESTS = 10_000
AT_A_TIME = 48
HELD = ("running", "waiting", "records", "outstanding", "stored", "visits", "held", "parked", "free_blocks", "load")
BEHAVIOURS = ("finishes", "finishes", "hangs up", "hangs up", "cancels", "reads slowly")


def message(number: int, chance: random.Random) -> bytes:
    """A streamed chat request; one in eight is spoken too."""
    text = f"{number} " + "ab " * chance.randrange(4)
    body: dict[str, object] = {"stream": True, "messages": [{"role": "user", "content": text}], "modalities": ["text"]}
    if number % 8 == 0:
        body |= {"modalities": ["text", "audio"], "audio": {"voice": "echo", "format": "pcm16"}}
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + content


async def client(port: int, number: int, chance: random.Random) -> str:
    """One request, ended in one of the ways; returns which."""
    way = chance.choice(BEHAVIOURS)
    sent = message(number, chance)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
    try:
        if way == "hangs up":  # anywhere, in the middle of its own request too
            writer.write(sent[: chance.randrange(len(sent) * 2)])
            await asyncio.sleep(chance.random() * 0.03)
            return way
        writer.write(sent)
        if way == "cancels":
            await reader.read(chance.randrange(1, 2000))
            return way
        if way == "reads slowly":
            await reader.read(200)
            await asyncio.sleep(chance.random() * 0.3)
        answer = await reader.read(-1)
        assert b"[DONE]" in answer, answer[-300:]
        return way
    finally:
        writer.close()


async def load(server: Server, requests: int) -> tuple[Counter[str], list[int]]:
    """How the clients ended, and the bytes of the server's process over the run."""
    port = int(server.address.rpartition(":")[2])
    process = psutil.Process(server.process.pid)
    numbers = iter(range(requests))
    ways: Counter[str] = Counter()
    rss: list[int] = []

    async def worker(seed: int) -> None:
        chance = random.Random(seed)
        for number in numbers:
            ways[await client(port, number, chance)] += 1
            if number % 100 == 0:
                rss.append(process.memory_info().rss)

    await asyncio.gather(*(worker(seed) for seed in range(AT_A_TIME)))
    return ways, rss


def held(server: Server) -> dict[str, float]:
    """All counters of what is held, and the descriptors, threads and children of the family.

    Descriptors come first: a busy server may still hold the connection over which it gave the counters.
    """
    figures: dict[str, float] = {}
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    for process in family:
        figures[f"fds of {process.pid}"] = process.num_fds()
        figures[f"threads of {process.pid}"] = process.num_threads()
    for line in server.get("/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#") and "_total" not in name and any(word in name for word in HELD):
            figures[name] = float(value)
    return figures | {"processes": len(family)}


def at_rest(server: Server) -> dict[str, float]:
    """The figures once they no longer move."""
    last = held(server)
    while True:
        time.sleep(0.5)
        last, before = held(server), last
        if last == before:
            return last


def settled(server: Server, start: dict[str, float]) -> dict[str, tuple[float, float]]:
    """What is not back at its start after ten seconds: name to (start, now)."""
    deadline = time.monotonic() + 10
    while (now := held(server)) != start and time.monotonic() < deadline:
        time.sleep(0.1)
    names = start.keys() | now.keys()
    return {name: (start.get(name, 0), now.get(name, 0)) for name in names if start.get(name, 0) != now.get(name, 0)}


@pytest.mark.slow
def test_ten_thousand_requests_that_end_in_all_ways_leave_nothing_and_no_growth(tmp_path: Path) -> None:
    with serving(tmp_path, "echo3", "--set", "media.decode_processes=0") as server:
        asyncio.run(load(server, 300))  # threads, pools and caches come into being
        start = at_rest(server)
        ways, rss = asyncio.run(load(server, REQUESTS))
        assert settled(server, start) == {}
    assert sum(ways.values()) == REQUESTS
    assert min(ways.values()) > REQUESTS / 10
    third = len(rss) // 3
    assert median(rss[2 * third :]) / median(rss[third : 2 * third]) - 1 < MAX_GROWTH
