"""A stage process of `omnistage serve` is killed at each named point of the protocol, under load.

What was not at that stage is byte-correct; what was is run again, or fails at once with stage and code; nothing hangs;
/ready tells the truth. A point that is not reached fails its test.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from omnistage.faults import POINTS
from tests.reliability.load import Outcome, Watch, ask, restarts_of, watching
from tests.servers import Server, serving

pytestmark = pytest.mark.slow
KINDS = ("text", "text stream", "audio", "audio stream", "speech") * 2
LIGHT = ("--set", "media.decode_processes=0")
PACED = tuple(
    part for stage in ("thinker", "talker", "wave") for part in ("--set", f"stages.{stage}.step_delay_s=0.001")
)
TIGHT = ("--set", "edges.thinker->talker.max_inflight=2", "--set", "edges.talker->wave.max_inflight=2")
VICTIMS = {"text": {"thinker"}, "audio": {"thinker", "talker", "wave"}, "speech": {"talker", "wave"}}

# Point -> the stage it is tried at, and the hit that kills.
CASES: list[tuple[str, str, int]] = [
    ("message_received", "wave", 5), ("before_add", "thinker", 1), ("after_add", "talker", 2),
    ("before_release", "thinker", 3), ("chunk_received", "wave", 7), ("before_load", "talker", 4),
    ("after_load", "wave", 9), ("before_feed", "talker", 6), ("after_feed", "wave", 3), ("before_step", "thinker", 4),
    ("after_step", "talker", 5), ("before_prefill", "thinker", 0), ("after_prefill", "thinker", 0),
    ("before_decode", "talker", 8), ("after_decode", "thinker", 6), ("before_run", "wave", 2), ("after_run", "wave", 4),
    ("before_store", "talker", 10), ("after_store", "wave", 6), ("first_stored", "wave", 1),
    ("last_stored", "talker", 0),
    ("before_send", "thinker", 9), ("mid_send", "talker", 9), ("after_send", "wave", 5),
    ("before_finish", "thinker", 1),
    ("after_finish", "wave", 2), ("credit_lost", "thinker", 3), ("credit_back", "talker", 3), ("going_idle", "wave", 3),
]  # fmt: skip
# Points with tests of their own below or elsewhere.
ELSEWHERE = {"before_abort", "after_abort", "probe_received", "shutdown_received", "engine_built"}
DIFFUSION = ("before_encode", "before_denoise", "after_denoise", "before_picture", "after_picture")


def killing(stage: str, point: str, after: int) -> tuple[str, ...]:
    fault = json.dumps([{"point": point, "action": "kill", "after": after}])
    return ("--set", f"stages.{stage}.faults={fault}")


def test_every_named_point_is_tried() -> None:
    assert {point for point, _, _ in CASES} | ELSEWHERE | set(DIFFUSION) == set(POINTS)
    assert len(POINTS) >= 30


def client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.address, timeout=30, trust_env=False)


async def under_load(server: Server, stage: str) -> tuple[list[Outcome], Watch]:
    watch = Watch()
    async with client(server) as http, watching(http, watch):
        outcomes = await asyncio.gather(*(ask(http, kind, index) for index, kind in enumerate(KINDS)))
        deadline = time.monotonic() + 3  # the point may lie at the very end of the work
        while await restarts_of(http, stage) < 1:
            assert time.monotonic() < deadline, "the point was not reached"
            await asyncio.sleep(0.01)
    return outcomes, watch


@pytest.mark.parametrize(("point", "stage", "after"), CASES)
def test_stage_killed_there_harms_only_what_it_must(tmp_path: Path, point: str, stage: str, after: int) -> None:
    with serving(tmp_path, "echo3", *LIGHT, *PACED, *TIGHT, *killing(stage, point, after)) as server:
        outcomes, watch = asyncio.run(under_load(server, stage))
        late = asyncio.run(one(server))
    judge(outcomes, watch, stage)
    assert late.right


async def one(server: Server) -> Outcome:
    async with client(server) as http:
        return await ask(http, "audio", 99)


def judge(outcomes: list[Outcome], watch: Watch, stage: str) -> None:
    assert watch.down, f"/ready was never false in {len(watch.polls)} polls"
    assert watch.up - watch.down < 3
    for outcome in outcomes:
        refused = outcome.error is not None and outcome.error["code"] == "stage_unavailable"  # it came after the kill
        partly_sent = "stream" in outcome.kind or outcome.kind == "speech"
        could_fail = stage in VICTIMS[outcome.kind.split()[0]] and (partly_sent or refused)
        assert outcome.right or could_fail, outcome
        if outcome.right:
            continue
        assert outcome.error is not None, outcome
        assert outcome.error["code"] in ("stage_died", "stage_unavailable", "cut")
        assert outcome.error.get("stage", stage) == stage
        assert outcome.ended - watch.down < 1, "a victim heard of it late"


@pytest.mark.parametrize("point", ["before_abort", "after_abort"])
def test_stage_killed_at_an_abort_costs_only_the_aborted(tmp_path: Path, point: str) -> None:
    async def leave_and_go_on(server: Server) -> list[Outcome]:
        async with client(server) as http:
            others = [asyncio.create_task(ask(http, kind, i)) for i, kind in enumerate(("text", "audio", "text"))]
            request = {"messages": [{"role": "user", "content": "x" * 300}], "stream": True}
            async with http.stream("POST", "/v1/chat/completions", json=request) as reply:
                async for _ in reply.aiter_raw():
                    break
            outcomes = await asyncio.gather(*others)
            while await restarts_of(http, "thinker") < 1:
                await asyncio.sleep(0.01)
            return [*outcomes, await ask(http, "audio", 9)]

    with serving(tmp_path, "echo3", *LIGHT, *PACED, *killing("thinker", point, 0)) as server:
        outcomes = asyncio.run(asyncio.wait_for(leave_and_go_on(server), 20))
    assert [outcome.right for outcome in outcomes] == [True] * 4


def test_stage_killed_while_it_is_asked_what_it_holds_is_replayed(tmp_path: Path) -> None:
    values = ["stages.wave.step_delay_s=0.8", "edges.talker->wave.deadline_s=0.3"]
    values += ["edges.thinker->talker.deadline_s=0.3", "stages.wave.chunk_frames=1000"]
    slow = tuple(part for value in values for part in ("--set", value))
    with serving(tmp_path, "echo3", *LIGHT, *slow, *killing("wave", "probe_received", 0)) as server:
        outcome = asyncio.run(one(server))
        deadline = time.monotonic() + 10
        while asyncio.run(restarts(server, "wave")) < 1:
            assert time.monotonic() < deadline, "the point was not reached"
            time.sleep(0.02)
    assert outcome.right or (outcome.error or {}).get("stage") in ("wave", "talker")


async def restarts(server: Server, stage: str) -> float:
    async with client(server) as http:
        return await restarts_of(http, stage)


def test_stage_killed_during_shutdown_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, "echo3", *LIGHT, *killing("talker", "shutdown_received", 0)) as server:
        assert asyncio.run(one(server)).right
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0


def test_stage_killed_while_draining_does_not_lose_the_rest(tmp_path: Path) -> None:
    async def drained(server: Server) -> list[Outcome]:
        async with client(server) as http:
            tasks = [asyncio.create_task(ask(http, "audio", i)) for i in range(4)]
            await asyncio.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*tasks)

    slow = ("--set", "stages.thinker.step_delay_s=0.02")
    with serving(tmp_path, "echo3", *LIGHT, *slow, *killing("talker", "before_decode", 60)) as server:
        outcomes = asyncio.run(drained(server))
        assert server.process.wait(20) == 0
        assert "stage talker/0 went down" in server.log.read_text()
    assert [outcome.right for outcome in outcomes] == [True] * 4


IMAGE = {"prompt": "a fox", "size": "32x32", "seed": 5, "num_inference_steps": 8, "response_format": "b64_json"}


async def pictures(server: Server, count: int) -> list[str]:
    async with client(server) as http:
        replies = await asyncio.gather(*(http.post("/v1/images/generations", json=IMAGE) for _ in range(count)))
        found: list[Any] = [reply.json() for reply in replies]
        return [each["data"][0]["b64_json"] for each in found]


@pytest.mark.parametrize("point", DIFFUSION)
def test_diffusion_stage_killed_there_gives_the_same_pictures(tmp_path: Path, point: str) -> None:
    paced = ("--set", "stages.dit.step_delay_s=0.005")
    after = 3 if "denoise" in point else 0
    with serving(tmp_path, "toydit", *LIGHT, *paced, *killing("dit", point, after)) as server:
        broken = asyncio.run(pictures(server, 4))
        assert asyncio.run(restarts(server, "dit")) == 1
        whole = asyncio.run(pictures(server, 1))
    assert broken == whole * 4
