"""Streams of sound on a real run: served by when they run dry, and in turns.

`python -m bench.playback`. echo3 in processes, a wave stage that makes one chunk of one stream per 20 ms; streams with
chunks of 0.2 s and of 1 s at half and at four fifths of what the stage can play. A stream runs dry when a packet comes
more than 20 ms after all before it have been played.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import uvloop

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.bench.sample import underrun
from omnistage.request import OmniRequest
from omnistage.testing.closed_form import CODES_PER_TOKEN, SAMPLE_RATE, SAMPLES_PER_CODE

STEP_S = 0.02
SHORT_S, LONG_S = 0.2, 1.0
ARRIVAL_S = 0.1
TOLERANCE_S = 0.02
POLICIES = {"by when they run dry": "ttfp", "in turns": "throughput"}
# Numbers of streams with short and with long chunks.
LOADS = {"half": (3, 10), "four fifths": (6, 10)}


def share(short: int, long: int) -> float:
    """The part of the stage's time that streams of these numbers need to play without a stop."""
    return short * STEP_S / SHORT_S + long * STEP_S / LONG_S


def settings(objective: str, step_s: float) -> dict[str, Any]:
    """Overrides for echo3: a wave stage that serves one stream per step; what is measured is the wave alone."""
    return {
        "stages.wave.objective": objective,
        "stages.wave.max_num_seqs": 1,
        "stages.wave.step_delay_s": step_s,
        "edges.talker->wave.async_chunk": False,
        "edges.talker->wave.max_inflight": 1 << 14,
    }


async def play(
    engine: AsyncOmniEngine, short: int, long: int, seconds: float, arrival_s: float = ARRIVAL_S
) -> list[list[tuple[float, float]]]:
    """The packets of each stream, first those with short chunks: when each came, and the seconds of sound in it.

    Every `arrival_s` one more starts.
    """

    async def start(number: int, chunk_s: float) -> list[tuple[float, float]]:
        await asyncio.sleep(number * arrival_s)
        return await _stream(engine, f"s{number}", chunk_s, seconds)

    chunks = [SHORT_S] * short + [LONG_S] * long
    return await asyncio.gather(*(start(number, chunk_s) for number, chunk_s in enumerate(chunks)))


def dry(streams: list[list[tuple[float, float]]]) -> int:
    """How many of the streams ran dry."""
    return sum(underrun(packets) > TOLERANCE_S for packets in streams)


async def _stream(engine: AsyncOmniEngine, name: str, chunk_s: float, seconds: float) -> list[tuple[float, float]]:
    loop = asyncio.get_running_loop()
    tokens = int(seconds * SAMPLE_RATE / SAMPLES_PER_CODE / CODES_PER_TOKEN)
    frames = round(chunk_s * SAMPLE_RATE / SAMPLES_PER_CODE)
    request = OmniRequest(id=name, task="speech", prompt="x" * tokens, params={"chunk_frames": frames})
    packets: list[tuple[float, float]] = []
    async for output in engine.generate(request):
        if output.payload is not None and "audio" in output.payload.tensors:
            packets.append((loop.time(), output.payload["audio"].shape[-1] / SAMPLE_RATE))
    return packets


async def measure(objective: str, short: int, long: int, seconds: float) -> int:
    """How many streams ran dry on real processes; each plays for so many seconds."""
    async with AsyncOmniEngine(resolve_config("echo3", None, settings(objective, STEP_S))) as engine:
        return dry(await play(engine, short, long, seconds))


async def table(seconds: float) -> list[str]:
    """A row per load: streams that ran dry, by policy."""
    rows = [f"{'load':14s} " + " ".join(f"{name:>22s}" for name in POLICIES)]
    for name, (short, long) in LOADS.items():
        counts = [await measure(objective, short, long, seconds) for objective in POLICIES.values()]
        cells = " ".join(f"{count:>13d} of {short + long:>3d} dry" for count in counts)
        rows.append(f"{name:11s} {share(short, long):.0%} {cells}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds of sound per stream")
    print("\n".join(uvloop.run(table(parser.parse_args().seconds))))


if __name__ == "__main__":
    main()
