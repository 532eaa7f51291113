"""Hand-off between stages: latency and rate through three processes, and the connector alone.

    python -m bench.handoff

Three zero-work stages in three processes pass chunks through the real runtime. The connector alone is timed between two
processes with wake-up and acknowledgement, against a plain connector that makes a new segment for each message.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing import resource_tracker, shared_memory
from statistics import median

import msgspec
import numpy as np

from bench.report import machine, table
from omnistage.connectors.arena import Arena, ArenaView, create_arena_file
from omnistage.connectors.shm import ShmConnector
from omnistage.entrypoints.omni import AsyncOmni
from omnistage.messages import Chunk, ChunkKey, FrameBuffer, FromStage, frame
from omnistage.payload import MultimodalPayload

SIZES = {"4 KB": 4 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20}
ROUNDS = 5


# -- through the runtime


async def pipeline() -> list[tuple[str, ...]]:
    """Latency of one hand-off and chunks per second, over the three processes of echo3."""
    paced = {"thinker": {"step_delay_s": 0.004}, "wave": {"chunk_frames": 1}}  # no chunk waits behind another
    async with AsyncOmni("echo3", stages=paced) as omni:
        await omni.result("warm up " * 20)
        for _ in range(8):
            await omni.result("one request after the other, a chunk at a time, until the window is full")
        await omni.engine.idle()
        await asyncio.sleep(0.5)  # the replicas' last reports
        counters = {r.id.stage: r.counters for r in omni.engine.runtime.replicas.values()}
    async with AsyncOmni("echo3", stages={"wave": {"chunk_frames": 1}}) as omni:
        rates = [await rate(omni) for _ in range(ROUNDS)]
    rows: list[tuple[str, ...]] = [("hand-offs per second, median", f"{median(rates):.0f}")]
    for stage in ("talker", "wave"):
        p50, p99 = (counters[stage][name] * 1e6 for name in ("handoff_p50_s", "handoff_p99_s"))
        rows.append((f"latency into {stage}, p50 / p99", f"{p50:.0f} / {p99:.0f} us"))
    return rows


async def rate(omni: AsyncOmni) -> float:
    """Chunks handed on per second with 64 requests at once: text, code and audio chunks."""
    before = chunks(omni)
    started = time.perf_counter()
    await asyncio.gather(
        *(omni.result("sixty-four letters of text that nobody needs to hear at all, ok") for _ in range(64))
    )
    return (chunks(omni) - before) / (time.perf_counter() - started)


def chunks(omni: AsyncOmni) -> float:
    lines = omni.engine.render_metrics().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("omnistage_stage_chunks_total"))


# -- the connector alone


def ours(sock: socket.socket, fd: int, size: int, rounds: int) -> list[float]:
    """Producer: store, message, acknowledgement, release."""
    connector = ShmConnector(0, Arena(fd), {})
    payload = MultimodalPayload.of(data=np.ones(size, np.uint8))
    times = []
    for seq in range(rounds):
        started = time.perf_counter()
        key = ChunkKey("r", 0, "stage.out", seq)
        chunk = connector.store(key, False, payload)
        sock.sendall(frame(FromStage(chunks=[chunk])))
        sock.recv(1)
        connector.release(key)
        times.append(time.perf_counter() - started)
    return times


def ours_reader(sock: socket.socket, fd: int) -> None:
    connector = ShmConnector(0, None, {("stage", 0): ArenaView(fd)})
    buffer = FrameBuffer()
    while data := sock.recv(1 << 16):
        for raw in buffer.push(data):
            chunk: Chunk = msgspec.msgpack.decode(raw, type=FromStage).chunks[0]
            assert connector.load(chunk)["data"][-1] == 1
            sock.sendall(b"k")


def plain(sock: socket.socket, fd: int, size: int, rounds: int) -> list[float]:
    """Producer of the plain connector: everything msgpacked into a new segment per message."""
    data = np.ones(size, np.uint8)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        body = msgspec.msgpack.encode({"dtype": str(data.dtype), "shape": data.shape, "data": data.tobytes()})
        segment = shared_memory.SharedMemory(create=True, size=len(body))
        memoryview(segment.buf or b"")[: len(body)] = body
        sock.sendall(f"{segment.name} {len(body)}\n".encode())
        sock.recv(1)
        segment.close()
        segment.unlink()
        times.append(time.perf_counter() - started)
    return times


def plain_reader(sock: socket.socket, fd: int) -> None:
    while line := sock.recv(1 << 10):
        name, length = line.split()
        segment = shared_memory.SharedMemory(name.decode())
        message = msgspec.msgpack.decode(bytes(memoryview(segment.buf or b"")[: int(length)]))
        assert np.frombuffer(message["data"], message["dtype"])[-1] == 1
        segment.close()
        sock.sendall(b"k")


Writer = Callable[[socket.socket, int, int, int], list[float]]
Reader = Callable[[socket.socket, int], None]


def timed(writer: Writer, reader: Reader, size: int) -> float:
    """Median seconds per message, first ones not counted."""
    rounds = 200 if size <= 1 << 20 else 20
    fd = create_arena_file(48 << 20)
    here, there = socket.socketpair()
    child = multiprocessing.get_context("fork").Process(target=run_reader, args=(reader, here, there, fd))
    child.start()
    there.close()
    times = writer(here, fd, size, rounds)
    here.close()
    child.join()
    os.close(fd)
    return median(times[rounds // 5 :])


def run_reader(reader: Reader, here: socket.socket, there: socket.socket, fd: int) -> None:
    here.close()
    reader(there, fd)


def connector() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, size in SIZES.items():
        pairs = [(timed(ours, ours_reader, size), timed(plain, plain_reader, size)) for _ in range(ROUNDS)]
        ratio = median(other / own for own, other in pairs)
        rows.append(
            (
                name,
                f"{median(p[0] for p in pairs) * 1e6:.0f} us",
                f"{median(p[1] for p in pairs) * 1e6:.0f} us",
                f"{ratio:.1f}x",
            )
        )
    return rows


def main() -> None:
    resource_tracker.ensure_running()  # one for all processes, or those that only read would tell of leaks
    print(machine() + "\n")
    print(table(("payload", "arena connector", "plain connector", "ratio"), connector()))
    print()
    print(table(("three processes", "figure"), asyncio.run(pipeline())))


if __name__ == "__main__":
    main()
