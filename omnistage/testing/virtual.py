"""A whole engine on virtual time, in one thread: the real orchestrator, runtime, stage loops, schedulers and arenas,
with an event loop whose clock jumps to the next timer and stages whose steps take the seconds that a law says.

`run(main)` runs a coroutine; `AsyncOmniEngine(config, Stages(law))` is an engine in it. A day of load takes seconds.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from omnistage.config.model import OmniConfig, PipelineConfig
from omnistage.connectors.inline import LocalStore
from omnistage.runtime.plan import HostPlan, ReplicaId, ReplicaPlan
from omnistage.runtime.replica import OpenReplica, Pace
from omnistage.stages.base import InputChunk, StageEngine, StageRequest, StepOutput

T = TypeVar("T")
# Seconds of a step, from the stage's name and what the step was.
Law = Callable[[str, StepOutput], float]


class _JumpingSelector(selectors.DefaultSelector):
    """Waits by moving its clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("everything waits for nothing: no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual seconds."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class _InPlace(Executor):
    """Runs at once, in the caller's thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future = Future[T]()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
            raise
        return future


class _Charged:
    """A `StageEngine` whose steps take the seconds of the law; `spent` are those of the current turn."""

    def __init__(self, inner: StageEngine, stage: str, law: Law) -> None:
        self._inner = inner
        self._stage = stage
        self._law = law
        self.spent = 0.0

    def clock(self) -> float:
        return asyncio.get_running_loop().time() + self.spent

    def step(self, only: frozenset[str] | None = None) -> StepOutput:
        output = self._inner.step(only)
        self.spent += self._law(self._stage, output)
        return output

    def add(self, request: StageRequest) -> None:
        self._inner.add(request)

    def feed(self, chunk: InputChunk) -> None:
        self._inner.feed(chunk)

    def abort(self, request_id: str) -> None:
        self._inner.abort(request_id)

    def hold(self, request_id: str, held: bool) -> None:
        self._inner.hold(request_id, held)

    def has_work(self) -> bool:
        return self._inner.has_work()

    def request_ids(self) -> frozenset[str]:
        return self._inner.request_ids()

    def counters(self) -> dict[str, float]:
        return self._inner.counters()

    def check_integrity(self) -> None:
        self._inner.check_integrity()

    def close(self) -> None:
        self._inner.close()


class VirtualReplica:
    """Drives one stage loop: a turn, then nothing for as long as its step took."""

    def __init__(self, replica: OpenReplica, charged: _Charged, sock: socket.socket) -> None:
        self.parts = replica
        self._charged = charged
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._open = True
        replica.loop.begin()
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if not self._open:
            return
        self._loop.remove_reader(self._socket)
        self._charged.spent = 0.0
        try:
            self.parts.loop.turn(block=False)
        except (BrokenPipeError, ConnectionResetError):
            self.close()
            return
        if self.parts.loop.stopping:
            self.close()
        elif self.parts.loop.pending or self._charged.spent:
            self._timer = self._loop.call_later(self._charged.spent, self._turn)
        else:
            self._loop.add_reader(self._socket, self._turn)

    def check_integrity(self) -> None:
        """Raises IntegrityError when the books of the engine or of its connectors do not add up."""
        if self._open:
            self.parts.engine.check_integrity()
            self.parts.hub.check_integrity()

    def close(self) -> None:
        """The end, by shutdown or by kill: what was not sent is lost."""
        if not self._open:
            return
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._socket)
        self.parts.loop.end()
        self.parts.close()
        self._socket.close()


class VirtualHost:
    """A `Host` of virtual replicas."""

    def __init__(self, plan: HostPlan, config: OmniConfig, pipeline: PipelineConfig, store: LocalStore) -> None:
        self.plan = plan
        self.law: Law = lambda stage, output: 0.0
        self.replicas: dict[ReplicaId, VirtualReplica] = {}
        self._setup = (config, pipeline, store)
        self._killed = False

    @property
    def pid(self) -> int | None:
        return None

    async def start(self, plans: list[ReplicaPlan]) -> None:
        for plan in plans:
            sock = socket.socket(fileno=plan.socket_fd)
            self.replicas[plan.replica] = self._open(plan, sock)
        if self._killed:
            self.kill()

    def _open(self, plan: ReplicaPlan, sock: socket.socket) -> VirtualReplica:
        config, pipeline, store = self._setup
        built: list[_Charged] = []

        def around(engine: StageEngine) -> StageEngine:
            built.append(_Charged(engine, plan.replica.stage, self.law))
            return built[0]

        pace = Pace(clock=lambda: built[0].clock(), executor=_InPlace(), around=around)
        return VirtualReplica(OpenReplica(config, pipeline, plan, store, sock, pace), built[0], sock)

    async def wait(self) -> str:
        for replica in self.replicas.values():
            replica.close()
        return "killed" if self._killed else "ended"

    def kill(self) -> None:
        """Ends it; one that has not started yet never runs."""
        self._killed = True
        for replica in self.replicas.values():
            replica.close()

    def worked_s(self) -> float:
        """Virtual seconds are no CPU seconds."""
        return 0.0


class Stages:
    """Makes the hosts of one engine (a `HostFactory`); `hosts` are the latest by name."""

    def __init__(self, law: Law) -> None:
        self._law = law
        self.hosts: dict[str, VirtualHost] = {}

    def __call__(self, plan: HostPlan, config: OmniConfig, pipeline: PipelineConfig, store: LocalStore) -> VirtualHost:
        host = VirtualHost(plan, config, pipeline, store)
        host.law = self._law
        self.hosts[plan.name] = host
        return host
