"""Cosmos3 on the diffusion engine against the library pipeline, on a small random checkpoint, in one run.

    python -m bench.diffusion

One request end to end (tensors out); what the reasoner's kept K/V saves; 8 and 16 mixed requests against the pipeline
one by one and against our own one by one; media seconds per second; latency of action-policy requests.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from bench.report import machine, table
from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.omni import OmniResult, ResultBuilder
from tests.models.cosmos3.asks import ask_of, request_of
from tests.models.cosmos3.tiny import Tiny, make, reference

PAIRS = 5
ONE = "video"
MIXED = ("image", "video", "video_unguided", "image_to_video", "video_to_video", "sound", "policy", "forward_dynamics")
CONTROL_LOOPS = 40


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Ours:
    """The engine in this process; `run` answers requests together or one by one."""

    def __init__(self, engine: AsyncOmniEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._count = 0

    def run(self, asks: list[dict[str, Any]], *, together: bool = True) -> list[OmniResult]:
        return self._loop.run_until_complete(self._all(asks) if together else self._each(asks))

    async def _all(self, asks: list[dict[str, Any]]) -> list[OmniResult]:
        return list(await asyncio.gather(*(self._answer(ask) for ask in asks)))

    async def _each(self, asks: list[dict[str, Any]]) -> list[OmniResult]:
        return [await self._answer(ask) for ask in asks]

    async def _answer(self, ask: dict[str, Any]) -> OmniResult:
        self._count += 1
        request, media = request_of(f"r{self._count}", ask)
        request.params.pop("return_latents")
        builder = ResultBuilder(request.id)
        async for output in self._engine.generate(request, media):
            builder.add(output)
        return builder.result().raise_for_error()


def asks(count: int) -> list[dict[str, Any]]:
    """Requests of other modes, shapes, step counts and seeds."""
    found = []
    for index in range(count):
        ask = ask_of("base", MIXED[index % len(MIXED)])
        found.append(ask | {"seed": index, "num_inference_steps": 4 + index % 5})
    return found


def mixed(ours: Ours, tiny: Tiny, count: int) -> tuple[str, ...]:
    jobs = asks(count)
    runs = [
        (
            seconds(lambda: ours.run(jobs)),
            seconds(lambda: ours.run(jobs, together=False)),
            seconds(lambda: [reference(tiny, job) for job in jobs]),
        )
        for _ in range(PAIRS)
    ]
    together = median(run[0] for run in runs)
    return (
        f"{count} mixed requests",
        f"{count / together:.2f} requests/s",
        f"{median(r[2] / r[0] for r in runs):.2f}x of the pipeline one by one",
        f"{median(r[1] / r[0] for r in runs):.2f}x of ours one by one",
    )


def figures(ours: Ours, tiny: Tiny) -> list[tuple[str, ...]]:
    one = ask_of("base", ONE) | {"num_inference_steps": 12}
    ours.run([one])
    pairs = [(seconds(lambda: ours.run([one])), seconds(lambda: reference(tiny, one))) for _ in range(PAIRS)]
    rows: list[tuple[str, ...]] = [
        (
            "one request, 12 steps, guided",
            f"{median(p[0] for p in pairs) * 1e3:.0f} ms",
            f"{median(p[0] / p[1] for p in pairs):.2f} of the pipeline's time",
            "its reasoner runs in every step, ours once",
        )
    ]
    rows += [mixed(ours, tiny, count) for count in (8, 16)]
    sound = ask_of("base", "sound") | {"num_inference_steps": 8}
    took = seconds(lambda: ours.run([sound]))
    media_s = sound["num_frames"] / 24.0
    rows.append(("video with sound, 8 steps", f"RTF {took / media_s:.2f}", f"{media_s / took:.2f} media s per s", ""))
    policy = ask_of("base", "policy") | {"num_inference_steps": 4}
    loops = sorted(seconds(lambda: ours.run([policy])) for _ in range(CONTROL_LOOPS))
    rows.append(
        ("action policy, 4 steps", f"p50 {median(loops) * 1e3:.0f} ms", f"p99 {loops[-1] * 1e3:.0f} ms", "control loop")
    )
    before = psutil.Process().memory_info().rss
    ours.run(asks(16))
    grown = (psutil.Process().memory_info().rss - before) / 16
    rows.append(("memory kept per request after 16", f"{max(0.0, grown) / 2**20:.1f} MB", "", ""))
    return rows


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tiny = make("base", Path(folder) / "base")
        config = resolve_config(str(tiny.folder), None, {"placement": "inline", "dtype": "float32"})
        loop = asyncio.new_event_loop()
        engine = AsyncOmniEngine(config)
        loop.run_until_complete(engine.start())
        rows = figures(Ours(engine, loop), tiny)
        loop.run_until_complete(engine.stop())
    print(machine() + ", 1 thread\n")
    print(table(("Cosmos3, small random weights", "figure", "against", ""), rows))


if __name__ == "__main__":
    main()
