"""Overload on virtual time, with the real admission, orchestrator, stage loops and schedulers: goodput, objectives and
promises hold at ten times the load that fits, where an unbounded queue answers nobody in time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import mean
from typing import Any

import pytest

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.request import OmniRequest
from omnistage.stages.base import StepOutput
from omnistage.testing.leakcheck import settled
from omnistage.testing.overload import SHAPES, MakeRequest, Run, drive, steady
from omnistage.testing.virtual import Stages, run

WAIT_S = 8.0
SLO_S = 2 * WAIT_S
SECONDS = 40.0
PEAK = 5.3  # pictures per second that the law of `picture_seconds` lets through
UNBOUNDED = {"limits.max_wait_s": 1e9, "limits.max_running": 100_000}


def picture_seconds(stage: str, output: StepOutput) -> float:
    """A step of a diffusion stage: a constant part and one per row."""
    return 0.004 + 0.0005 * sum(output.rows) if output.batch else 0.0


def picture(name: str, chance: random.Random) -> OmniRequest:
    """Work between 1 and 16 times the least."""
    size = {"width": chance.choice((16, 32, 64)), "height": 32}
    params = size | {"num_inference_steps": chance.choice((4, 8, 16))}
    return OmniRequest(id=name, task="image", prompt=name, stream=False, params=params)


def renamed(name: str, chance: random.Random) -> OmniRequest:
    return picture(f"warm {name}", chance)


def some_urgent(name: str, chance: random.Random) -> OmniRequest:
    """One in twenty is urgent, one in two can wait."""
    request = picture(name, chance)
    request.priority = chance.choice((1, *(0,) * 9, *(-1,) * 10))
    return request


@asynccontextmanager
async def warm(settings: dict[str, Any]) -> AsyncIterator[AsyncOmniEngine]:
    """An engine that has answered some fifty requests, and is at rest at the end."""
    limits = {"limits.max_wait_s": WAIT_S, "limits.max_queue": 100_000, "limits.request_timeout_s": 1e6}
    config = resolve_config("toydit", None, limits | {"stages.dit.max_num_seqs": 8} | settings)
    async with AsyncOmniEngine(config, Stages(picture_seconds)) as engine:
        await drive(engine, steady(0.8 * PEAK, 12.0, random.Random(0)), renamed, random.Random(0))
        yield engine
        await settled(engine)


def loaded(
    rate: float,
    shape: str = "steady",
    *,
    seed: int = 1,
    returning: float = 1.0,
    make: MakeRequest = picture,
    seconds: float = SECONDS,
    **settings: Any,
) -> Run:
    async def main() -> Run:
        async with warm(settings.get("settings", {})) as engine:
            chance = random.Random(seed)
            return Run(seconds, await drive(engine, SHAPES[shape](rate, seconds, chance), make, chance, returning))

    return run(main())


def goodput(run_: Run) -> float:
    return run_.goodput(SLO_S, 10.0, run_.seconds)


@pytest.mark.slow
def test_ten_times_the_load_costs_neither_goodput_nor_the_objective_of_those_let_in() -> None:
    best = max(goodput(loaded(rate * PEAK, seconds=30, returning=0)) for rate in (0.8, 0.95))
    over = loaded(10 * PEAK, seconds=30, returning=0)
    assert goodput(over) >= 0.95 * best
    assert over.kept(SLO_S) >= 0.99


@pytest.mark.slow
def test_unbounded_queue_answers_hardly_anyone_in_time_under_the_same_load() -> None:
    best = goodput(loaded(0.95 * PEAK, seconds=30, returning=0))
    over = loaded(3 * PEAK, seconds=30, settings=UNBOUNDED)
    assert over.kept(SLO_S) < 0.5
    assert over.goodput(SLO_S, 20.0, 30.0) < 0.95 * best


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "seed"), [("steady", 1), ("steady", 2), ("bursts", 3), ("ramp", 4)])
def test_goodput_objectives_and_promises_hold_for_every_shape_of_load(shape: str, seed: int) -> None:
    best = max(goodput(loaded(rate * PEAK, seed=seed)) for rate in (0.8, 0.95))
    over = loaded(10 * PEAK, shape, seed=seed)
    assert goodput(over) >= 0.95 * best
    assert over.kept(SLO_S) >= 0.99
    errors = over.promises()
    assert len(errors) > 1000
    assert errors[int(0.95 * len(errors))] <= 0.2
    assert max(fate.refusals for fate in over.fates) < 20


@pytest.mark.slow
@pytest.mark.parametrize("returning", [0.0, 0.05, 0.5])
def test_clients_that_never_come_back_cost_no_goodput_and_few_wrong_promises(returning: float) -> None:
    over = loaded(10 * PEAK, seed=4, returning=returning)
    assert goodput(over) >= 0.95 * goodput(loaded(0.95 * PEAK, seed=4))
    assert over.kept(SLO_S) >= 0.99
    errors = [0.0, *over.promises()]
    assert errors[int(0.75 * len(errors))] <= 0.2


def test_urgent_requests_are_let_in_and_answered_first_and_the_others_keep_their_objective() -> None:
    over = loaded(5 * PEAK, make=some_urgent, returning=0, seconds=40)
    by_class = {level: [fate for fate in over.fates if fate.priority == level] for level in (1, 0, -1)}
    refused = {level: sum(fate.refusals > 0 for fate in fates) / len(fates) for level, fates in by_class.items()}
    assert refused[1] < 0.03
    assert refused[1] < refused[0] < refused[-1]
    waited = {level: mean(f.latency_s for f in fates if f.done < 1e9) for level, fates in by_class.items()}
    assert waited[1] < waited[0] < waited[-1]
    assert waited[1] < 0.5 * waited[-1]
    assert over.kept(SLO_S) >= 0.99


def test_request_that_comes_back_when_told_to_is_let_in_while_newcomers_are_refused() -> None:
    async def main() -> None:
        async with warm({}) as engine:
            chance = random.Random(3)
            crowd = asyncio.create_task(drive(engine, steady(10 * PEAK, 20.0, chance), picture, chance, 0.0))
            await asyncio.sleep(10)
            chosen = await drive(engine, iter([0.0]), picture, chance, 1.0)
            fates = await crowd
        late = [fate for fate in fates if fate.arrived > 12]
        assert sum(fate.refusals for fate in late) > 0.7 * len(late)
        assert chosen[0].done < 1e9

    run(main())
