"""Overload on a real run: goodput at ten times the load that fits, bounded by predicted work and unbounded.

`python -m bench.overload`. toydit in a process of its own with steps that take 10 ms; pictures of 4, 8 or 16 steps, two
at a time. Half of the refused clients come back when they are told to. Prints a row per run.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import uvloop

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.request import OmniRequest
from omnistage.testing.overload import Run, drive, steady

WAIT_S = 2.0
SLO_S = 2 * WAIT_S
UNBOUNDED: dict[str, Any] = {"limits.max_wait_s": 1e6, "limits.max_running": 100_000}
SETTINGS: dict[str, Any] = {
    "stages.dit.max_num_seqs": 2,
    "stages.dit.step_delay_s": 0.01,
    "limits.max_wait_s": WAIT_S,
    "limits.max_queue": 100_000,
}


def picture(name: str, chance: random.Random) -> OmniRequest:
    """A small picture of 4, 8 or 16 steps."""
    params = {"num_inference_steps": chance.choice((4, 8, 16))}
    return OmniRequest(id=name, task="image", prompt=name, stream=False, params=params)


async def measure(rate: float, seconds: float, settings: dict[str, Any], returning: float = 0.5) -> Run:
    """A load of so many requests per second on an engine that has seen some; of the refused clients, the share
    `returning` comes back."""
    config = resolve_config("toydit", None, SETTINGS | settings)
    async with AsyncOmniEngine(config) as engine:
        chance = random.Random(1)
        await drive(engine, steady(10.0, 2.0, chance), picture, chance)
        return Run(seconds, await drive(engine, steady(rate, seconds, chance), picture, chance, returning))


def row(name: str, run: Run) -> str:
    """One line of the table."""
    goodput, kept = run.goodput(SLO_S, min(4.0, run.seconds / 3), run.seconds), run.kept(SLO_S)
    errors = [0.0, *run.promises()]
    late = f"{errors[int(0.9 * len(errors))]:.0%}"
    refused = sum(fate.refusals > 0 for fate in run.fates)
    return f"{name:28s} {len(run.fates):6d} {refused:8d} {goodput:9.1f}/s {kept:9.1%} {late:>10s}"


async def table(capacity: float, seconds: float) -> list[str]:
    """Rows of the runs at and beyond capacity (requests per second)."""
    head = f"{'load':28s} {'asked':>6s} {'refused':>8s} {'goodput':>11s} {'in time':>9s} {'told, p90':>10s}"
    runs = [
        ("what fits", await measure(0.9 * capacity, seconds, {})),
        ("ten times that", await measure(10 * capacity, seconds, {})),
        ("three times that, unbounded", await measure(3 * capacity, seconds, UNBOUNDED)),
    ]
    return [head, *(row(name, run) for name, run in runs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=float, default=18.0, help="requests per second that the engine can do")
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    print("\n".join(uvloop.run(table(options.capacity, options.seconds))))


if __name__ == "__main__":
    main()
