"""Counts what a server may leak, before and after: records, chunks, blocks, slots, fds, threads, children."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import msgspec
import psutil

from omnistage.engine.async_engine import AsyncOmniEngine

SETTLE_TIMEOUT_S = 10.0
_RESTING = ("running", "waiting", "parked", "requests", "held", "visits", "stored_chunks")


class Leaks(AssertionError):
    """Something is not back where it started; the text names each counter."""


class Snapshot(msgspec.Struct, frozen=True):
    """Counters at one moment. `stages` holds the resting counters of every replica; memory is in bytes."""

    records: int
    chunks: int
    admitted: int
    stages: dict[str, dict[str, float]]
    fds: dict[int, int]
    threads: dict[int, int]
    children: int
    shm_files: int
    rss_bytes: dict[int, int]

    def differences(self, later: Snapshot) -> list[str]:
        """What has grown, memory aside."""
        found = []
        for name in ("records", "chunks", "admitted", "stages", "fds", "threads", "children", "shm_files"):
            before, after = msgspec.structs.asdict(self)[name], msgspec.structs.asdict(later)[name]
            if before != after:
                found.append(f"{name}: {before} -> {after}")
        return found


def snapshot(engine: AsyncOmniEngine) -> Snapshot:
    """Counts now; take it when the engine is idle (`settled`). What only the collector still holds does not count."""
    gc.collect()
    main = psutil.Process()
    children = main.children(recursive=True)
    family = [main, *children]
    gauges = engine.gauges()
    return Snapshot(
        records=int(gauges["request_records"]),
        chunks=int(gauges["outstanding_chunks"]),
        admitted=int(gauges["requests_running"] + gauges["requests_waiting"]),
        stages={
            str(replica.id): {
                name: value
                for name, value in replica.counters.items()
                if name in _RESTING or name in ("free_blocks", "free_slots")
            }
            for replica in engine.runtime.replicas.values()
        },
        fds={process.pid: process.num_fds() for process in family},
        threads={process.pid: process.num_threads() for process in family},
        children=len(children),
        shm_files=sum(1 for _ in Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else 0,
        rss_bytes={process.pid: process.memory_info().rss for process in family},
    )


def resting(engine: AsyncOmniEngine) -> bool:
    """True when no record, chunk or stage counter says that anything is held."""
    gauges = engine.gauges()
    idle = not any(gauges[name] for name in ("request_records", "outstanding_chunks", "requests_running"))
    replicas = engine.runtime.replicas.values()
    return idle and not any(replica.counters.get(name, 0) for replica in replicas for name in _RESTING)


async def settled(engine: AsyncOmniEngine) -> None:
    """Returns when the engine is at rest and its books add up. Raises Leaks naming what stays held."""
    try:
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            await engine.idle()
            while not resting(engine):
                await asyncio.sleep(0.01)
    except TimeoutError:
        held = {str(r.id): {k: v for k, v in r.counters.items() if k in _RESTING and v}
                for r in engine.runtime.replicas.values()}  # fmt: skip
        raise Leaks(f"not at rest: {engine.gauges()} {held}") from None
    engine.check_integrity()


async def check_no_leaks(engine: AsyncOmniEngine, before: Snapshot) -> Snapshot:
    """Waits for rest, then compares. Raises Leaks."""
    await settled(engine)
    after = snapshot(engine)
    found = before.differences(after)
    if found:
        raise Leaks("; ".join(found))
    return after
