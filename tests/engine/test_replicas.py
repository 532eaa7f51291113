"""Replicas of a stage: all answers arrive, work is spread as the policy says, one that dies takes only its own down."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import Any

import pytest

from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.errors import ErrorCode
from omnistage.testing.closed_form import text_of_wave
from tests.engines import answer, running

THREE = {f"stages.{stage}.replicas": 3 for stage in ("thinker", "talker", "wave")}


def served_by(engine: AsyncOmniEngine, stage: str) -> list[float]:
    """Steps of each replica of a stage."""
    return [replica.counters.get("steps", 0) for replica in engine.runtime.of_stage(stage)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["least_work", "round_robin", "random"])
async def test_three_replicas_answer_three_hundred_requests(policy: str) -> None:
    async with running("echo3", THREE | {"replica_policy": policy, "placement": "inline"}) as engine:
        prompts = [f"request {i}" for i in range(300)]
        results = await asyncio.gather(*(answer(engine, id=f"r{i}", prompt=p) for i, p in enumerate(prompts)))
        assert [text_of_wave(r.tensors["audio"][0]) for r in results] == prompts
        text = engine.render_metrics().decode()
        chunks = {i: _metric(text, f'omnistage_stage_chunks_total{{replica="{i}",stage="thinker"}}') for i in range(3)}
    assert sum(chunks.values()) >= 300 * len("request 1")
    share = {"least_work": 0.2, "round_robin": 0.3, "random": 0.2}[policy]
    assert min(chunks.values()) >= share * sum(chunks.values())


def _metric(text: str, name: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


async def test_round_robin_takes_turns_exactly() -> None:
    overrides: dict[str, Any] = {"stages.thinker.replicas": 3, "replica_policy": "round_robin", "placement": "inline"}
    async with running("echo3", overrides) as engine:
        for i in range(6):
            await answer(engine, id=str(i), prompt="ab", modalities=("text",))
        await engine.idle()
        await asyncio.sleep(0.3)
        assert Counter(served_by(engine, "thinker")) == Counter({6: 3})  # two requests of three steps each


async def test_long_common_prefix_stays_with_its_replica() -> None:
    overrides: dict[str, Any] = {"stages.thinker.replicas": 3, "placement": "inline"}
    async with running("echo3", overrides) as engine:
        prefix = "shared instructions " * 20
        for i in range(4):
            await answer(engine, id=f"p{i}", prompt=f"{prefix}{i}", modalities=("text",))
        steps = [replica.counters.get("prefill_tokens", 0) for replica in engine.runtime.of_stage("thinker")]
        cached = [replica.counters.get("cached_tokens", 0) for replica in engine.runtime.of_stage("thinker")]
    assert sum(count > 0 for count in steps) == 1
    assert max(cached) >= 3 * (len(prefix) - 16)


@pytest.mark.parametrize("stage", ["thinker", "wave"])
async def test_killed_replica_fails_or_replays_only_its_own(stage: str) -> None:
    slow = {f"stages.{name}.step_delay_s": 0.004 for name in ("thinker", "talker", "wave")}
    async with running("echo3", slow | {f"stages.{stage}.replicas": 2}) as engine:
        text = "forty characters of text to be spoken out"
        tasks = [asyncio.create_task(answer(engine, id=str(i), prompt=text)) for i in range(8)]
        await asyncio.sleep(0.12)
        pid = engine.runtime.pid_of(engine.runtime.of_stage(stage)[0])
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while engine.health().healthy:
            await asyncio.sleep(0.002)
        assert engine.health().ready  # the other replica serves on
        late = await answer(engine, id="late", prompt="taken over")
        results = await asyncio.gather(*tasks)
        while not engine.health().healthy:
            await asyncio.sleep(0.01)
    assert text_of_wave(late.tensors["audio"][0]) == "taken over"
    failed = [result for result in results if result.error is not None]
    assert len(failed) <= 4
    assert all(r.error is not None and r.error.code == ErrorCode.STAGE_DIED for r in failed)
    for result in results:
        if result.error is None:
            assert text_of_wave(result.tensors["audio"][0]) == text


async def test_co_located_replicas_share_their_processes() -> None:
    pair = {"stages": {"talker": {"placement": "inline", "with": "thinker", "replicas": 2}, "thinker": {"replicas": 2}}}
    async with running("echo3", pair) as engine:
        pids = {
            stage: [engine.runtime.pid_of(r) for r in engine.runtime.of_stage(stage)] for stage in ("thinker", "talker")
        }
        results = await asyncio.gather(*(answer(engine, id=str(i), prompt=f"pair {i}") for i in range(6)))
    assert pids["thinker"] == pids["talker"]
    assert len(set(pids["thinker"])) == 2
    assert [text_of_wave(r.tensors["audio"][0]) for r in results] == [f"pair {i}" for i in range(6)]
