"""Soak: mixed load with disconnects and killed stages on a real server, then a count of everything that is held.

`python -m tests.reliability.soak --seconds 1200` (make soak). Ends with a report on stdout and status 1 when something
is wrong: a wrong answer, a hang, a counter that is not back at its start, memory that grew in the last third.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.reliability.load import Outcome, ask
from tests.servers import Server, serving

KINDS = ("text", "text stream", "audio", "audio stream", "speech")
STAGES = ("thinker", "talker", "wave")
FORGIVEN = ("stage_died", "stage_unavailable", "cut")
RESTING = ("records", "outstanding", "_running", "_waiting", "stored", "visits", "_held", "parked", "load", "requests{")
MAX_GROWTH = 0.03
SAMPLE_S = 1.0


@dataclass
class Report:
    """What a soak saw. `rss` samples are bytes of the server process alone: stages are replaced when killed."""

    asked: int = 0
    right: int = 0
    forgiven: int = 0
    left: int = 0
    kills: int = 0
    wrong: list[Outcome] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)

    def problems(self) -> list[str]:
        found = [f"wrong answer: {outcome}" for outcome in self.wrong[:5]]
        found += [f"still held: {name} = {value:g}" for name, value in self.held.items() if value]
        third = len(self.rss) // 3
        if third >= 3:
            middle, last = sorted(self.rss[third : 2 * third]), sorted(self.rss[2 * third :])
            growth = last[len(last) // 2] / middle[len(middle) // 2] - 1
            found += [f"memory grew by {growth:.1%} in the last third"] if growth > MAX_GROWTH else []
        return found


async def soak(server: Server, seconds: float, *, kill_every_s: float, seed: int = 1, workers: int = 8) -> Report:
    """Runs the load for so long, then waits for rest."""
    report, end = Report(), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=server.address, timeout=60, trust_env=False) as http:
        jobs = [_worker(http, report, random.Random(seed * 1000 + number), end) for number in range(workers)]
        await asyncio.gather(
            *jobs, _killer(server, report, random.Random(seed), (end, kill_every_s)), _sampler(server, report, end)
        )
        report.held = await _at_rest(http)
    return report


async def _worker(http: httpx.AsyncClient, report: Report, chance: random.Random, end: float) -> None:
    while time.monotonic() < end:
        report.asked += 1
        kind, index = chance.choice(KINDS), chance.randrange(1000)
        if chance.random() < 0.3:
            await _leave(http, kind, index, chance.random() * 0.1)
            report.left += 1
            continue
        outcome = await ask(http, kind, index)
        if outcome.right:
            report.right += 1
        elif outcome.error is not None and outcome.error["code"] in FORGIVEN:
            report.forgiven += 1
        else:
            report.wrong.append(outcome)


async def _leave(http: httpx.AsyncClient, kind: str, index: int, after_s: float) -> None:
    """Asks and hangs up."""
    task = asyncio.create_task(ask(http, kind, index))
    await asyncio.sleep(after_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _killer(server: Server, report: Report, chance: random.Random, when: tuple[float, float]) -> None:
    end, every_s = when
    while every_s and time.monotonic() + every_s < end:
        await asyncio.sleep(every_s)
        for child in psutil.Process(server.process.pid).children():
            if f"{chance.choice(STAGES)}/0" in child.cmdline():
                child.send_signal(signal.SIGKILL)
                report.kills += 1


async def _sampler(server: Server, report: Report, end: float) -> None:
    process = psutil.Process(server.process.pid)
    while time.monotonic() < end:
        report.rss.append(process.memory_info().rss)
        await asyncio.sleep(SAMPLE_S)


async def _at_rest(http: httpx.AsyncClient) -> dict[str, float]:
    """The counters of what is held, once they no longer fall."""
    deadline = time.monotonic() + 20
    while True:
        text = (await http.get("/metrics")).text
        ready = (await http.get("/ready")).status_code == 200
        held = {"not ready": float(not ready)}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if line.startswith("omnistage_") and "_total" not in name and any(word in name for word in RESTING):
                held[name] = float(value)
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.1)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds between kills; 0 for none")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "echo3") as server:
        report = asyncio.run(soak(server, options.seconds, kill_every_s=options.kill_every))
    counts = f"{report.right} right, {report.forgiven} failed by name, {report.left} left, {report.kills} kills"
    print(f"{report.asked} requests in {options.seconds:g} s: {counts}")
    problems = report.problems()
    print("\n".join(problems) or "nothing held, nothing wrong, no growth")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
