"""Random histories of a whole engine on virtual time: orchestrator, stage loops, schedulers, block pools, arenas.

Requests come, are read fast or slowly, are aborted; stages die; chunks are lost or come twice. After every event all
books add up; at the end every request has ended once, rightly or with an error that names it, and nothing is held.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.omni import OmniResult, ResultBuilder
from omnistage.errors import ErrorCode, OmniError
from omnistage.faults import FaultSpec
from omnistage.request import FinishReason, OmniRequest
from omnistage.stages.base import StepOutput
from omnistage.testing.closed_form import text_of_wave
from omnistage.testing.leakcheck import settled
from omnistage.testing.virtual import Stages, VirtualLoop
from tests.fuzzing import examples

STAGES = ("thinker", "talker", "wave")
FAULTS = st.tuples(st.sampled_from(STAGES), st.sampled_from(("drop", "duplicate")), st.integers(0, 60))
NAMED = {ErrorCode.STAGE_DIED, ErrorCode.HANDOFF, ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED}
DEADLINE_S = 1.0
# A request without edges between stages is looked at every 30 s, and twice before it fails.
LONGEST_S = 100.0


def paced(stage: str, output: StepOutput) -> float:
    return 0.004 if output.batch else 0.0


@dataclass
class Client:
    """Takes as many events as it may; `ended` counts terminal ones."""

    request: OmniRequest
    aborted: bool = False
    ended: int = 0
    may_take: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    result: OmniResult | None = None
    refusal: ErrorCode | None = None

    async def run(self, engine: AsyncOmniEngine) -> None:
        builder = ResultBuilder(self.request.id)
        try:
            async for output in engine.generate(self.request):
                builder.add(output)
                self.ended += output.finished
                await self.may_take.acquire()
        except OmniError as error:
            self.refusal = error.info.code
            return
        self.result = builder.result()


class WholeEngine(RuleBasedStateMachine):
    """See the module's docstring."""

    @initialize(
        frames=st.sampled_from((4, 100)),
        inflight=st.integers(1, 8),
        batch=st.integers(1, 4),
        fault=st.none() | FAULTS,
    )
    def start(self, frames: int, inflight: int, batch: int, fault: tuple[str, Any, int] | None) -> None:
        set_to: dict[str, Any] = {"stages.wave.chunk_frames": frames, "limits.max_running": 4, "limits.max_queue": 3}
        for edge in ("thinker->talker", "talker->wave"):
            set_to |= {f"edges.{edge}.max_inflight": inflight, f"edges.{edge}.deadline_s": DEADLINE_S}
        for stage in STAGES:
            set_to |= {f"stages.{stage}.max_num_seqs": batch, f"stages.{stage}.arena_mb": 1}
        for stage in STAGES[:2]:
            set_to |= {f"stages.{stage}.block_size": 64 if batch > 1 else 8192}
        if fault is not None:
            set_to[f"stages.{fault[0]}.faults"] = [FaultSpec("after_store", fault[1], after=fault[2])]
        self.hosts = Stages(paced)
        self.loop = VirtualLoop()
        self.clients: list[Client] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.engine = AsyncOmniEngine(resolve_config("echo3", None, set_to), self.hosts)
        self.do(self.engine.start())
        self.do(asyncio.sleep(0.1))
        self.free = self.free_blocks()

    def do(self, work: Any) -> None:
        self.loop.run_until_complete(work)

    def free_blocks(self) -> dict[str, float]:
        """Of the AR stages."""
        return {stage: self.engine.runtime.of_stage(stage)[0].counters["free_blocks"] for stage in STAGES[:2]}

    @property
    def open(self) -> list[Client]:
        return [client for client, task in zip(self.clients, self.tasks, strict=True) if not task.done()]

    @rule(
        length=st.integers(0, 60),
        kind=st.sampled_from((("chat", ("text",)), ("chat", ("text", "audio")), ("speech", ("audio",)))),
        stream=st.booleans(),
        fast=st.booleans(),
        priority=st.integers(-1, 1),
    )
    def submit(self, length: int, kind: tuple[str, tuple[str, ...]], stream: bool, fast: bool, priority: int) -> None:
        number = len(self.clients)
        text = (f"{number} " + "words " * 10)[: length + 1]
        request = OmniRequest(
            id=f"r{number}", task=kind[0], modalities=kind[1], prompt=text, stream=stream, priority=priority
        )
        client = Client(request)
        if fast:
            client.may_take = asyncio.Semaphore(1 << 20)
        self.clients.append(client)
        self.tasks.append(self.loop.create_task(client.run(self.engine)))
        self.step(1)

    @rule(milliseconds=st.integers(1, 400))
    def step(self, milliseconds: int) -> None:
        self.do(asyncio.sleep(milliseconds / 1000))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), events=st.integers(1, 20))
    def read_some(self, data: st.DataObject, events: int) -> None:
        client = data.draw(st.sampled_from(self.open))
        for _ in range(events):
            client.may_take.release()
        self.step(1)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.open))
        client.aborted = True
        self.do(self.engine.abort(client.request.id))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """The client hangs up: nobody takes its events any more."""
        client = data.draw(st.sampled_from(self.open))
        client.aborted = True
        self.tasks[self.clients.index(client)].cancel()
        self.step(1)

    @rule(stage=st.sampled_from(STAGES))
    def kill(self, stage: str) -> None:
        self.hosts.hosts[f"{stage}/0"].kill()
        self.step(1)

    @invariant()
    def books_add_up(self) -> None:
        if not self.__dict__.get("engine"):
            return
        records = self.engine.orchestrator.records.values()
        for replica in self.engine.runtime.replicas.values():
            active = sum(
                visit.replica == replica.id and visit.state == "active" for r in records for visit in r.visits.values()
            )
            owed = sum(ack[0] == replica.id for record in records for ack in record.acks)
            assert replica.load == (active + owed if replica.state != "restarting" else 0), replica.id
        for host in self.hosts.hosts.values():
            for running in host.replicas.values():
                running.check_integrity()
        gauges = self.engine.gauges()
        assert gauges["requests_running"] <= 4
        assert gauges["requests_running"] + gauges["requests_waiting"] == len(self.open)

    def teardown(self) -> None:
        if not self.__dict__.get("engine"):
            return
        for client in self.clients:
            for _ in range(2000):
                client.may_take.release()
        self.do(asyncio.sleep(LONGEST_S))
        assert all(task.done() for task in self.tasks)
        for client in self.clients:
            self.judge(client)
        self.do(settled(self.engine))
        assert self.free_blocks() == self.free
        self.do(self.engine.stop())
        self.loop.close()

    def judge(self, client: Client) -> None:
        if client.aborted or client.refusal is not None:
            assert client.ended <= 1
            assert client.refusal in (None, *NAMED)
            return
        assert client.ended == 1
        assert client.result is not None
        if client.result.error is not None:
            assert client.result.error.code in NAMED
            return
        assert client.result.finish_reason == FinishReason.STOP
        wanted = client.request.modalities or ()
        if "text" in wanted:
            assert client.result.text == client.request.prompt
        if "audio" in wanted:
            assert text_of_wave(client.result.tensors["audio"][0]) == client.request.prompt


TestWholeEngine = pytest.mark.slow(WholeEngine.TestCase)
TestWholeEngine.settings = settings(
    max_examples=examples(40), stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
