"""StageRuntime: the replicas of all stages: launch, readiness, restart with back-off, shutdown.

It knows nothing of requests. The orchestrator hears of messages and of replicas that come up or go down.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from omnistage.config.model import CLIENT, OmniConfig, PipelineConfig
from omnistage.connectors.arena import create_arena_file
from omnistage.connectors.hub import ConnectorHub, open_hub
from omnistage.connectors.inline import LocalStore
from omnistage.errors import StageError
from omnistage.messages import Extent, FromStage, ToStage
from omnistage.runtime.host import Host, HostFactory, LocalHost, replica_socket
from omnistage.runtime.link import Link, Outgoing
from omnistage.runtime.plan import (
    MAIN_HOST,
    HostPlan,
    ReplicaId,
    ReplicaPlan,
    host_of,
    host_plans,
    inline_ports,
    port_credits,
    variant_of,
)

logger = logging.getLogger(__name__)

CLIENT_REPLICA = ReplicaId(CLIENT, 0)
CLIENT_ARENA_MB = 64
BACKOFF_FIRST_S = 0.05
BACKOFF_LAST_S = 10.0
# A replica that was up this long begins its pauses anew.
STABLE_S = 5.0
# One that died so often in quick succession is not waited for any more.
PATIENT_FAILURES = 3

State = Literal["starting", "ready", "draining", "sleeping", "restarting", "failed", "stopped"]


class RuntimeListener(Protocol):
    """Who hears from the replicas (the orchestrator)."""

    def on_message(self, replica: Replica, message: FromStage) -> None: ...

    def on_ready(self, replica: Replica) -> None: ...

    def on_down(self, replica: Replica, cause: str) -> None:
        """The replica holds nothing any more; it will be restarted unless the runtime is stopping."""
        ...

    def extents_of(self, replica: ReplicaId) -> list[Extent]:
        """What consumers still view of the arena of a replica that is about to start."""
        ...


@dataclass
class Replica:
    """One replica as the orchestrator sees it. `load` counts its live requests, `counters` are its last report.

    `planned`: it is down, or about to be, for a restart that somebody asked for, so that requests may wait for it.
    `failures` counts deaths in quick succession; `up_since` is the loop's clock.
    """

    id: ReplicaId
    host: str
    state: State = "starting"
    link: Link | None = None
    load: int = 0
    restarts: int = 0
    failures: int = 0
    up_since: float = 0.0
    planned: bool = False
    detail: str = ""
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def expected(self) -> bool:
        """True when requests may wait for it: it is up, or down for a restart that should bring it back."""
        coming = self.state in ("starting", "restarting") and self.failures <= PATIENT_FAILURES
        return self.ready or self.planned or coming

    def outbox(self) -> ToStage:
        """What the replica will be told at the end of this turn; lost when it is down."""
        return self.link.outbox() if self.link is not None else ToStage()


class StageRuntime:
    """Owns hosts, arenas and links. All methods belong to one event loop."""

    def __init__(
        self,
        config: OmniConfig,
        pipeline: PipelineConfig,
        listener: RuntimeListener,
        make_host: HostFactory = LocalHost,
    ) -> None:
        self._make_host = make_host
        self._config = config
        self._pipeline = pipeline
        self._listener = listener
        self._variant = variant_of(config, pipeline)
        self._plans = host_plans(config)
        self._store = LocalStore()
        self._outgoing = Outgoing()
        self._hosts: dict[str, Host] = {}
        self._arenas: dict[ReplicaId, int] = {}
        self._changed = asyncio.Event()
        self._stopping = False
        self._restarts: dict[str, asyncio.Task[None]] = {}
        self._retired: set[str] = set()
        self.replicas: dict[ReplicaId, Replica] = {
            replica: Replica(replica, plan.name) for plan in self._plans for replica in plan.replicas
        }
        self._create_arenas()
        self.client_hub = self._client_hub()

    def of_stage(self, stage: str) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.id.stage == stage]

    def pid_of(self, replica: Replica) -> int | None:
        host = self._hosts.get(replica.host)
        return host.pid if host is not None else None

    def worked_s(self, replica: Replica) -> float:
        """CPU seconds of the process or threads that the replica lives in; 0 when there are none."""
        host = self._hosts.get(replica.host)
        return host.worked_s() if host is not None else 0.0

    # -- start and stop

    async def start(self) -> None:
        """Launches everything and returns when all replicas are ready.

        Raises StageError naming the stage and the cause as soon as one fails; nothing is left running then.
        """
        await asyncio.gather(*(self._launch(plan) for plan in self._plans))
        try:
            async with asyncio.timeout(self._config.limits.start_timeout_s):
                await self._until_ready(self.replicas.values())
        except TimeoutError:
            waiting = ", ".join(str(r.id) for r in self.replicas.values() if not r.ready)
            await self.stop()
            raise StageError(
                f"not ready within limits.start_timeout_s = {self._config.limits.start_timeout_s:g} s: {waiting}"
            ) from None
        except StageError:
            await self.stop()
            raise

    async def _until_ready(self, replicas: Collection[Replica]) -> None:
        while down := [replica for replica in replicas if not replica.ready]:
            for replica in down:
                if replica.detail:  # why it went down, or a fatal report
                    cause = f"stage {replica.id.stage} did not start: {replica.detail}"
                    raise StageError(cause, stage=replica.id.stage)
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> None:
        """Ends all replicas: a shutdown message, then the lifeline, then a kill."""
        self._stopping = True
        for task in self._restarts.values():
            task.cancel()
        for replica in self.replicas.values():
            replica.outbox().shutdown = True
        await asyncio.gather(*(host.wait() for host in self._hosts.values()))
        for replica in self.replicas.values():
            if replica.link is not None:
                replica.link.close()
        self.client_hub.close()
        for fd in self._arenas.values():
            os.close(fd)
        self._arenas.clear()

    # -- planned interruptions

    def hosts_of(self, stage: str) -> list[HostPlan]:
        """The processes that host replicas of a stage."""
        return [plan for plan in self._plans if any(replica.stage == stage for replica in plan.replicas)]

    async def retire(self, plan: HostPlan) -> None:
        """Ends a process that has nothing to do; its replicas sleep until `revive`."""
        self._retired.add(plan.name)
        for replica in (self.replicas[each] for each in plan.replicas):
            replica.state = "sleeping"
            replica.counters = {}
            replica.outbox().shutdown = True
        await asyncio.sleep(0)  # lets the shutdown messages leave
        await self._hosts[plan.name].wait()

    async def revive(self, plan: HostPlan) -> None:
        """Launches a retired process and returns when its replicas are ready. Raises StageError."""
        self._retired.discard(plan.name)
        replicas = [self.replicas[each] for each in plan.replicas]
        for replica in replicas:
            replica.state = "starting"
            replica.detail = ""
            replica.restarts += 1
        await self._launch(plan)
        limit = self._config.limits.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self._until_ready(replicas)
        except TimeoutError:
            stage = plan.replicas[0].stage
            text = f"stage {stage} was not ready within limits.start_timeout_s = {limit:g} s"
            raise StageError(text, stage=stage) from None

    # -- launching

    def _create_arenas(self) -> None:
        for replica in self.replicas:
            self._arenas[replica] = create_arena_file(self._config.stages[replica.stage].arena_mb << 20)
        self._arenas[CLIENT_REPLICA] = create_arena_file(CLIENT_ARENA_MB << 20)

    def _client_hub(self) -> ConnectorHub:
        ports = inline_ports(self._config, self._variant, self._plans, MAIN_HOST, CLIENT)
        return open_hub(0, self._store, self._arenas[CLIENT_REPLICA], self._read_by(CLIENT), ports)

    def _read_by(self, stage: str) -> list[tuple[str, int, int]]:
        """Stage, index and arena descriptor of the producers that a stage (or the client) reads from."""
        producers = {edge.source_stage for edge in self._variant.edges if edge.target_stage == stage}
        return [(r.stage, r.index, fd) for r, fd in self._arenas.items() if r.stage in producers]

    async def _launch(self, plan: HostPlan) -> None:
        host = self._make_host(plan, self._config, self._pipeline, self._store)
        self._hosts[plan.name] = host
        loop = asyncio.get_running_loop()
        replica_plans: list[ReplicaPlan] = []
        for replica_id in plan.replicas:
            replica = self.replicas[replica_id]
            ours, theirs = replica_socket()
            hears, closes = partial(self._on_message, replica), partial(self._on_closed, replica, host)
            replica.link = Link(self._outgoing, hears, closes)
            await loop.create_unix_connection(partial(_same, replica.link), sock=ours)
            replica_plans.append(self._replica_plan(replica_id, theirs))
        await host.start(replica_plans)

    def _replica_plan(self, replica: ReplicaId, socket_fd: int) -> ReplicaPlan:
        stage = self._config.stages[replica.stage]
        host = host_of(self._plans, replica).name
        return ReplicaPlan(
            replica=replica,
            socket_fd=socket_fd,
            arena_fd=self._arenas[replica],
            reads=self._read_by(replica.stage),
            inline_ports=inline_ports(self._config, self._variant, self._plans, host, replica.stage),
            credits=port_credits(self._config, self._variant, replica.stage),
            extents=self._listener.extents_of(replica),
            faults=tuple(fault for fault in stage.faults if fault.always or self.replicas[replica].restarts == 0),
        )

    # -- events of replicas

    def _on_message(self, replica: Replica, message: FromStage) -> None:
        if message.counters:
            replica.counters = message.counters
        if message.fatal is not None:
            replica.detail = message.fatal.message
            self._changed.set()
        if message.ready:
            replica.state = "ready"
            replica.planned = False
            replica.up_since = asyncio.get_running_loop().time()
            replica.detail = ""
            self._changed.set()
            self._listener.on_ready(replica)
        self._listener.on_message(replica, message)

    def _on_closed(self, replica: Replica, host: Host) -> None:
        if self._stopping:
            replica.state = "stopped"
            return
        if self._hosts.get(host.plan.name) is not host:
            return
        replica.link = None
        if host.plan.name in self._retired:
            return
        if host.plan.name not in self._restarts:
            self._restarts[host.plan.name] = asyncio.create_task(self._restart(host))

    async def _restart(self, host: Host) -> None:
        """Takes a whole host down, tells the orchestrator, and launches it anew after a growing pause."""
        ended = [self.replicas[replica] for replica in host.plan.replicas]
        now = asyncio.get_running_loop().time()
        for replica in ended:
            stable = replica.state in ("ready", "draining") and now - replica.up_since > STABLE_S
            replica.failures = 1 if stable else replica.failures + 1
            replica.state = "restarting"
            replica.planned = False
            replica.restarts += 1
            replica.load = 0
            replica.counters = {}
            if replica.link is not None:
                replica.link.close()
                replica.link = None
        host.kill()
        how = await host.wait()
        for replica in ended:
            replica.detail = replica.detail or how
            logger.error("stage %s went down: %s", replica.id, replica.detail)
            self._listener.on_down(replica, replica.detail)
        self._changed.set()
        failures = max(replica.failures for replica in ended)
        await asyncio.sleep(min(BACKOFF_LAST_S, BACKOFF_FIRST_S * 2 ** (failures - 1)))
        del self._restarts[host.plan.name]
        if not self._stopping:
            await self._launch(host.plan)


def _same(link: Link) -> Link:
    return link
