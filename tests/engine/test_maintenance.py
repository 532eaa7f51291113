"""Sleep, wake and rolling restart: no request lost, equal output afterwards, caches dropped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omnistage.entrypoints.omni import OmniResult
from omnistage.errors import ErrorCode, OmniError, RequestError
from omnistage.testing.closed_form import text_of_wave
from tests.engines import answer, running

pytestmark = pytest.mark.slow
TEXT = "the quick brown fox jumps over the lazy dog"
PLACEMENTS: dict[str, dict[str, Any]] = {
    "processes": {},
    "threads": {"placement": "inline"},
    "shared process": {"stages": {"talker": {"placement": "inline", "with": "thinker"}}},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_stage_that_slept_gives_equal_output_and_has_dropped_its_prefix_cache(placement: str) -> None:
    async with running("echo3", PLACEMENTS[placement]) as engine:
        before = [await answer(engine, id=str(i), prompt=TEXT) for i in range(2)]
        stages = await engine.sleep("thinker")
        assert not engine.health().ready
        with pytest.raises(RequestError) as refused:
            await answer(engine, id="asleep", prompt=TEXT)
        assert (refused.value.info.code, refused.value.info.stage) == (ErrorCode.UNAVAILABLE, stages[0])
        assert await engine.wake("thinker") == stages
        after = await answer(engine, id="after", prompt=TEXT)
    assert "thinker" in stages
    assert ("talker" in stages) == (placement != "processes")
    assert (after.text, after.tensors["audio"].tobytes()) == (before[0].text, before[0].tensors["audio"].tobytes())
    assert cached(before[1]) > 0
    assert cached(after) == 0


def cached(result: OmniResult) -> int:
    assert result.metrics is not None
    return result.metrics.stages["thinker"].cached_tokens


async def test_sleeping_stage_is_healthy_but_not_ready_and_requests_without_it_go_on() -> None:
    async with running("echo3") as engine:
        await engine.sleep("wave")
        assert engine.health().healthy
        assert not engine.health().ready
        alone = await answer(engine, id="text", prompt=TEXT, modalities=("text",))
        assert engine.runtime.of_stage("wave")[0].state == "sleeping"
        await engine.wake("wave")
        assert engine.health().ready
    assert alone.text == TEXT


async def test_sleep_waits_for_the_requests_that_need_the_stage() -> None:
    slow = {"stages.thinker.step_delay_s": 0.005}
    async with running("echo3", slow) as engine:
        task = asyncio.create_task(answer(engine, id="a", prompt=TEXT))
        await asyncio.sleep(0.05)
        await engine.sleep("wave")
        assert task.done()
        await engine.wake("wave")
    assert text_of_wave(task.result().tensors["audio"][0]) == TEXT


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stage", ["thinker", "talker", "wave"])
async def test_rolling_restart_under_load_loses_no_request(stage: str, replicas: int) -> None:
    overrides: dict[str, Any] = {f"stages.{name}.step_delay_s": 0.002 for name in ("thinker", "talker", "wave")}
    async with running("echo3", overrides | {f"stages.{stage}.replicas": replicas}) as engine:
        pids = [engine.runtime.pid_of(replica) for replica in engine.runtime.of_stage(stage)]
        tasks = [asyncio.create_task(answer(engine, id=f"a{i}", prompt=f"{TEXT} {i}")) for i in range(4)]
        await asyncio.sleep(0.05)
        restarting = asyncio.create_task(engine.restart(stage))
        await asyncio.sleep(0.05)
        tasks += [asyncio.create_task(answer(engine, id=f"b{i}", prompt=f"{TEXT} {i}")) for i in range(4)]
        assert await restarting == [stage]
        results = await asyncio.gather(*tasks)
        assert not set(pids) & {engine.runtime.pid_of(replica) for replica in engine.runtime.of_stage(stage)}
    for index, result in enumerate(results):
        assert text_of_wave(result.tensors["audio"][0]) == result.text == f"{TEXT} {index % 4}"


async def test_commands_that_do_not_fit_are_refused_and_change_nothing() -> None:
    slow = {"stages.thinker.step_delay_s": 0.01, "limits.drain_timeout_s": 0.1}
    async with running("echo3", slow) as engine:
        with pytest.raises(RequestError):
            await engine.sleep("nobody")
        with pytest.raises(OmniError, match="is ready, not sleeping"):
            await engine.wake("wave")
        task = asyncio.create_task(answer(engine, id="a", prompt=TEXT))
        await asyncio.sleep(0.05)
        with pytest.raises(OmniError, match="still had work"):
            await engine.restart("thinker")
        assert engine.health().ready
        assert (await task).text == TEXT
        await engine.sleep("wave")
        with pytest.raises(OmniError, match="is sleeping, not ready"):
            await engine.restart("wave")


async def test_draining_by_command_refuses_and_resumes() -> None:
    async with running("echo3") as engine:
        engine.set_draining(True)
        with pytest.raises(RequestError, match="shutting down"):
            await answer(engine, id="a", prompt=TEXT)
        engine.set_draining(False)
        assert (await answer(engine, id="b", prompt=TEXT)).text == TEXT
