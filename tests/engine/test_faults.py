"""Faults in stages and hand-offs: named, contained, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.errors import ErrorCode, StageError
from omnistage.faults import Action, Point
from omnistage.testing.closed_form import text_of_wave
from omnistage.testing.faults import fault
from tests.engines import answer, running

INLINE = {"placement": "inline"}
TEXT = "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize(
    ("point", "stage"),
    [("before_add", "thinker"), ("before_add", "wave"), ("before_feed", "talker"), ("before_feed", "wave")],
)
async def test_exception_on_one_request_ends_that_one_and_names_the_stage(stage: str, point: Point) -> None:
    async with running("echo3", INLINE | fault(stage, point, "raise", request="bad")) as engine:
        results = await asyncio.gather(*(answer(engine, id=i, prompt=TEXT) for i in ("bad", "b", "c")))
    assert results[0].error is not None
    assert (results[0].error.code, results[0].error.stage) == (ErrorCode.STAGE_FAILED, stage)
    assert "InjectedFault" in results[0].error.message
    for result in results[1:]:
        assert text_of_wave(result.tensors["audio"][0]) == TEXT


@pytest.mark.parametrize("stage", ["thinker", "talker", "wave"])
async def test_step_that_raises_once_costs_nobody_anything(stage: str) -> None:
    async with running("echo3", INLINE | fault(stage, "before_step", "raise", after=3)) as engine:
        results = await asyncio.gather(*(answer(engine, id=str(i), prompt=TEXT) for i in range(4)))
    assert [text_of_wave(r.tensors["audio"][0]) for r in results] == [TEXT] * 4


@pytest.mark.parametrize("action", ["drop", "duplicate"])
@pytest.mark.parametrize("point", ["after_store", "chunk_received"])
@pytest.mark.parametrize("after", [0, 5])
async def test_lost_or_repeated_chunk_is_an_error_that_names_the_edge(action: Action, point: Point, after: int) -> None:
    stage = "talker"
    overrides = fault(stage, point, action, request="bad", after=after) | {"edges.talker->wave.deadline_s": 1}
    async with running("echo3", overrides) as engine:
        results = await asyncio.gather(*(answer(engine, id=i, prompt=TEXT) for i in ("bad", "b")))
    error = results[0].error
    assert error is not None
    assert error.code == ErrorCode.HANDOFF
    assert (error.edge or "").startswith("talker.codes" if point == "after_store" else "thinker.text")
    assert "chunk" in error.message
    assert text_of_wave(results[1].tensors["audio"][0]) == TEXT


async def test_last_chunk_lost_on_the_way_is_found_within_the_deadline() -> None:
    overrides = fault("talker", "chunk_received", "drop", after=len(TEXT))  # the final chunk of the text
    async with running("echo3", overrides | {"edges.thinker->talker.deadline_s": 0.5}) as engine:
        started = time.monotonic()
        result = await answer(engine, id="a", prompt=TEXT)
        took = time.monotonic() - started
        assert (await answer(engine, id="b", prompt="ok")).text == "ok"
    assert result.error is not None
    assert (result.error.code, result.error.edge) == (ErrorCode.HANDOFF, "thinker->talker")
    assert "never reached stage talker" in result.error.message
    assert took < 10


async def test_stalled_stage_is_an_error_that_names_it() -> None:
    overrides = fault("talker", "before_step", "stall", stall_s=2.0) | {"edges.thinker->talker.deadline_s": 0.3}
    async with running("echo3", overrides | {"edges.talker->wave.deadline_s": 0.3}) as engine:
        result = await answer(engine, id="a", prompt=TEXT)
    assert result.error is not None
    assert "talker" in result.error.message


async def test_stage_that_stalls_while_another_goes_on_answering_is_found() -> None:
    overrides = fault("talker", "before_step", "stall", after=5, stall_s=2.0)
    quick = {f"edges.{edge}.deadline_s": 0.3 for edge in ("thinker->talker", "talker->wave")}
    async with running("echo3", overrides | quick) as engine:
        started = time.monotonic()
        result = await answer(engine, id="a", prompt=TEXT)
        took = time.monotonic() - started
    assert result.error is not None
    assert (result.error.code, result.error.stage) == (ErrorCode.HANDOFF, "talker")
    assert took < 1.9


BUSY = """
import time
from omnistage.kit import Part, Text, pipeline, stage

@stage(takes={"text": Text()}, gives={"mid": Text()})
def compute(part: Part):
    end = time.thread_time() + 1.2
    while time.thread_time() < end:
        pass
    return part["text"]

@stage(takes={"mid": Text()}, gives={"text": Text()})
def tell(part: Part):
    return part["mid"].upper()

both = pipeline("both", compute, tell)
"""


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["inline", "process"])
async def test_step_longer_than_the_deadline_is_no_stall_while_it_computes(tmp_path: Path, placement: str) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    settings = {"placement": placement, "edges.compute->tell.deadline_s": 0.2}
    async with running(str(tmp_path / "busy.py"), settings) as engine:
        result = await answer(engine, id="a", prompt="done")
    assert (result.error, result.text) == (None, "DONE")


@pytest.mark.parametrize("stage", ["thinker", "talker", "wave"])
async def test_killed_stage_comes_back_and_its_requests_are_replayed_or_fail_by_name(stage: str) -> None:
    slow = {f"stages.{name}.step_delay_s": 0.003 for name in ("thinker", "talker", "wave")}
    async with running("echo3", slow) as engine:
        tasks = [asyncio.create_task(answer(engine, id=str(i), prompt=TEXT)) for i in range(6)]
        quiet = asyncio.create_task(answer(engine, id="quiet", prompt=TEXT, modalities=("text",)))
        await asyncio.sleep(0.15)
        replica = engine.runtime.of_stage(stage)[0]
        pid = engine.runtime.pid_of(replica)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while engine.health().ready:
            await asyncio.sleep(0.005)
        while not engine.health().ready:
            await asyncio.sleep(0.01)
        results = await asyncio.gather(*tasks)
        alone = await quiet
        assert engine.runtime.pid_of(replica) != pid
        assert replica.restarts == 1
    if stage != "thinker":
        assert (alone.text, alone.error) == (TEXT, None)
    for result in results:
        if result.error is None:
            assert text_of_wave(result.tensors["audio"][0]) == result.text == TEXT
        else:
            assert (result.error.code, result.error.stage) == (ErrorCode.STAGE_DIED, stage)


async def test_request_whose_stage_dies_before_any_of_its_output_is_replayed_without_repeating_text() -> None:
    overrides = fault("wave", "chunk_received", "kill", after=2)
    async with running("echo3", overrides | {"stages.wave.chunk_frames": 1000}) as engine:
        result = await answer(engine, id="a", prompt=TEXT)
    assert result.error is None
    assert text_of_wave(result.tensors["audio"][0]) == result.text == TEXT
    assert len(result.token_ids) == len(TEXT)


async def test_failed_start_names_stage_and_cause_and_leaves_nothing() -> None:
    config = resolve_config("echo3", None, fault("talker", "engine_built", "raise"))
    engine = AsyncOmniEngine(config)
    with pytest.raises(StageError, match=r"stage talker did not start: InjectedFault: injected at engine_built"):
        await engine.start()
    assert all(replica.state in ("stopped", "restarting") for replica in engine.runtime.replicas.values())


async def test_stage_killed_during_start_is_named() -> None:
    config = resolve_config("echo3", None, fault("wave", "engine_built", "kill"))
    with pytest.raises(StageError, match=r"stage wave did not start: killed by signal 9"):
        await AsyncOmniEngine(config).start()


async def test_request_that_fails_in_the_turn_that_reaches_a_stage_leaves_nothing_there() -> None:
    """The first chunk for the wave comes twice in one message: its visit begins and ends in one turn."""
    async with running("echo3", fault("talker", "after_store", "duplicate", request="bad")) as engine:
        result = await answer(engine, id="bad", prompt=TEXT)
        assert result.error is not None
        await asyncio.sleep(0.5)
        (wave,) = engine.runtime.of_stage("wave")
        assert (wave.counters.get("visits", 0), wave.counters.get("running", 0)) == (0, 0)
