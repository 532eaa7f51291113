"""Load on an engine, on virtual or real time: what arrives when, who comes back, and what became of it."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod

from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.errors import ErrorCode, RequestError
from omnistage.request import OmniRequest

MakeRequest = Callable[[str, random.Random], OmniRequest]


@dataclass
class Fate:
    """One client's request: when it arrived, how often and until when it was sent away, when it was done (seconds).

    `size` is its work in units of the maker of the load.
    """

    arrived: float
    priority: int = 0
    size: float = 1.0
    refusals: int = 0
    refused_at: float = 0.0
    promised_s: float = 0.0
    let_in: float = math.inf
    done: float = math.inf

    @property
    def latency_s(self) -> float:
        """From being let in to the end of the answer."""
        return self.done - self.let_in

    @property
    def promise_error(self) -> float:
        """How far the time told at the first refusal was off, as a share of it."""
        return abs(self.let_in - self.refused_at - self.promised_s) / self.promised_s


@dataclass
class Run:
    """All fates of a run, and its length in seconds of arrivals."""

    seconds: float
    fates: list[Fate] = field(default_factory=list)

    @property
    def let_in(self) -> list[Fate]:
        return [fate for fate in self.fates if fate.done < math.inf]

    def kept(self, slo_s: float) -> float:
        """The share of those that were let in whose answer came within the objective."""
        inside = self.let_in
        return sum(fate.latency_s <= slo_s for fate in inside) / len(inside)

    def goodput(self, slo_s: float, begin: float, end: float) -> float:
        """Sizes of the answers, per second, that came within the objective, among those done in `begin..end`."""
        good = [fate.size for fate in self.let_in if fate.latency_s <= slo_s and begin <= fate.done < end]
        return sum(good) / (end - begin)

    def promises(self) -> list[float]:
        """Errors of the times told, of all that came back and were let in."""
        return sorted(fate.promise_error for fate in self.let_in if fate.refusals)


def steady(rate: float, seconds: float, chance: random.Random) -> Iterator[float]:
    """Arrival times of a Poisson process."""
    now = chance.expovariate(rate)
    while now < seconds:
        yield now
        now += chance.expovariate(rate)


def bursts(rate: float, seconds: float, chance: random.Random) -> Iterator[float]:
    """The same mean rate in bursts: twice the rate for 5 s, nothing for 5 s."""
    return (now for now in steady(2 * rate, seconds, chance) if now % 10 < 5)


def ramp(rate: float, seconds: float, chance: random.Random) -> Iterator[float]:
    """From nothing to twice the rate."""
    return (now for now in steady(2 * rate, seconds, chance) if chance.random() < now / seconds)


SHAPES = {"steady": steady, "bursts": bursts, "ramp": ramp}


async def drive(
    engine: AsyncOmniEngine, times: Iterator[float], make: MakeRequest, chance: random.Random, returning: float = 1.0
) -> list[Fate]:
    """Sends a request at each time; refused clients come back when told to with probability `returning`."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    tasks: list[asyncio.Task[Fate]] = []
    for number, when in enumerate(times):
        await asyncio.sleep(began + when - loop.time())
        request = make(f"r{number}", chance)
        comes_back = chance.random() < returning
        tasks.append(asyncio.create_task(_client(engine, request, began, comes_back)))
    return await asyncio.gather(*tasks)


def size_of(request: OmniRequest) -> float:
    """Steps times pixels of a picture, in thousands; 1 for anything else."""
    asked = [float(request.params.get(name) or 0) for name in ("num_inference_steps", "width", "height")]
    return prod(asked) / 1000 if all(asked) else 1.0


async def _client(engine: AsyncOmniEngine, request: OmniRequest, began: float, comes_back: bool) -> Fate:
    loop = asyncio.get_running_loop()
    fate = Fate(loop.time() - began, request.priority, size_of(request))
    while True:
        asked = loop.time() - began
        wait_s = await _refusal(engine, request)
        if wait_s is None:
            fate.let_in, fate.done = asked, loop.time() - began
            return fate
        if not fate.refusals:
            fate.refused_at, fate.promised_s = asked, wait_s
        fate.refusals += 1
        if not comes_back:
            return fate
        await asyncio.sleep(wait_s)


async def _refusal(engine: AsyncOmniEngine, request: OmniRequest) -> float | None:
    """None for a good answer, else the seconds after which to come back. Any other end is an AssertionError."""
    wait_s = None
    try:
        async for output in engine.generate(request):
            assert output.error is None, output.error
    except RequestError as error:
        wait_s = error.info.retry_after_s if error.info.code == ErrorCode.OVERLOADED else None
        if wait_s is None:
            raise
    return wait_s
