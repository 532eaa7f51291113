"""HunyuanImage-3.0 on the tiny checkpoint of its tests: seconds per image, images per second, memory of deployments.

python -m bench.hunyuan_image3
"""

from __future__ import annotations

import asyncio
import time
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.report import machine, spread, table
from omnistage.entrypoints.omni import AsyncOmni
from omnistage.request import RequestMetrics

FOLDER = Path("tests/models/hunyuan_image3/data")
SIZES = ("192x192", "256x256", "320x192", "192x320")
TOGETHER = 4
ROUNDS = 3


def ask(index: int, **more: Any) -> dict[str, Any]:
    size = SIZES[index % len(SIZES)]
    return {
        "task": "image",
        "prompt": f"a red cat, number {index}",
        "seed": index,
        "size": size,
        "bot_task": "image",
    } | more


async def metrics_of(omni: AsyncOmni, request: dict[str, Any]) -> RequestMetrics:
    metrics = (await omni.result(request)).raise_for_error().metrics
    assert metrics is not None
    return metrics


async def deployment(name: str, deploy: Path | None) -> tuple[str, ...]:
    """One row: seconds per image alone, images per second four at once, memory of its processes."""
    async with AsyncOmni(str(FOLDER), deploy, dtype="float32") as omni:
        await metrics_of(omni, ask(0, num_inference_steps=4))
        alone = [(await metrics_of(omni, ask(i, num_inference_steps=4))).e2el_s for i in range(ROUNDS)]
        rates = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            await asyncio.gather(*(metrics_of(omni, ask(i, num_inference_steps=4)) for i in range(TOGETHER)))
            rates.append(TOGETHER / (time.perf_counter() - started))
        runtime = omni.engine.runtime
        pids = {runtime.pid_of(replica) for replica in runtime.replicas.values()} - {None}
        memory = sum(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20
    return name, spread(alone, " s", 2), f"{median(rates):.2f}", f"{memory:.0f} in {len(pids)} process(es)"


async def main() -> None:
    two = Path(str(resources.files("omnistage.models.hunyuan_image3"))) / "two_processes.yaml"
    rows = [await deployment("ar_dit co-located, one backbone", None), await deployment("ar_dit in two processes", two)]
    print(machine() + "\n")
    print(table(("deployment", "E2EL per image, 4 steps", "images/s, 4 at once", "memory MB"), rows))


if __name__ == "__main__":
    asyncio.run(main())
