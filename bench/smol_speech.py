"""smol-speech: first audio against the whole answer, RTF at 1, 4 and 8 streams, memory of each process.

python -m bench.smol_speech
"""

from __future__ import annotations

import asyncio
import time

import psutil

from bench.report import machine, spread, table
from omnistage.entrypoints.omni import AsyncOmni
from omnistage.request import RequestMetrics

QUESTIONS = (
    "What is the capital of France?",
    "Tell me two facts about the moon.",
    "How do plants make food?",
    "Why do leaves change colour in autumn?",
    "What should I cook with rice and beans?",
)
STREAMS = (1, 4, 8)


async def ask(omni: AsyncOmni, question: str) -> RequestMetrics:
    request = {"prompt": question, "sampling": {"thinker": {"temperature": 0.0, "max_tokens": 64}}, "seed": 1}
    metrics = (await omni.result(request)).raise_for_error().metrics
    assert metrics is not None
    return metrics


async def main() -> None:
    started = time.perf_counter()
    async with AsyncOmni("smol-speech") as omni:
        ready_s = time.perf_counter() - started
        await ask(omni, QUESTIONS[0])
        print(machine())
        print(f"start to ready with cached weights: {ready_s:.1f} s\n")
        rows = []
        for streams in STREAMS:
            began = time.perf_counter()
            answers = [m for q in QUESTIONS for m in await asyncio.gather(*(ask(omni, q) for _ in range(streams)))]
            wall = time.perf_counter() - began
            audio = sum(m.audio_s or 0.0 for m in answers)
            first = [m.ttfp_s or 0.0 for m in answers]
            shares = [(m.ttfp_s or 0.0) / m.e2el_s for m in answers]
            rtfs = [m.rtf or 0.0 for m in answers]
            rows.append(
                (streams, spread(first, " s", 2), spread(shares, "", 2), spread(rtfs, "", 2), f"{audio / wall:.2f}")
            )
        print(table(("streams", "TTFP", "TTFP / E2EL", "RTF per request", "audio s per s"), rows))
        print()
        print(table(("process", "memory MB"), memory(omni)))


def memory(omni: AsyncOmni) -> list[tuple[str, str]]:
    """Resident memory of the engine's process and of each worker."""
    rows = [("engine", f"{psutil.Process().memory_info().rss / 2**20:.0f}")]
    for replica in omni.engine.runtime.replicas.values():
        pid = omni.engine.runtime.pid_of(replica)
        if pid is not None:
            rows.append((str(replica.id), f"{psutil.Process(pid).memory_info().rss / 2**20:.0f}"))
    return rows


if __name__ == "__main__":
    asyncio.run(main())
