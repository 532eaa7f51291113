"""Planned interruptions: a stage sleeps and wakes, or restarts process by process, without losing a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omnistage.config.model import OmniConfig
from omnistage.engine.orchestrator import Orchestrator
from omnistage.errors import ErrorCode, OmniError, RequestError
from omnistage.runtime.plan import HostPlan
from omnistage.runtime.stage_runtime import StageRuntime

LOOK_AGAIN_S = 0.01


class Maintenance:
    """One command at a time. Stages of one process act together."""

    def __init__(self, config: OmniConfig, orchestrator: Orchestrator, runtime: StageRuntime) -> None:
        self._config = config
        self._orchestrator = orchestrator
        self._runtime = runtime
        self._lock = asyncio.Lock()

    async def sleep(self, stage: str) -> list[str]:
        """See `EngineControl.sleep`."""
        async with self._lock:
            hosts = self._hosts(stage, "ready")
            stages = _stages(hosts)
            self._mark(hosts, "draining", planned=False)
            try:
                await self._until(lambda: not self._orchestrator.needs(stages), stages)
                await self._until(lambda: all(self._at_rest(host) for host in hosts), stages)
            except OmniError:
                self._mark(hosts, "ready", planned=False)
                raise
            for host in hosts:
                await self._runtime.retire(host)
            return stages

    async def wake(self, stage: str) -> list[str]:
        """See `EngineControl.wake`."""
        async with self._lock:
            hosts = self._hosts(stage, "sleeping")
            for host in hosts:
                await self._runtime.revive(host)
            return _stages(hosts)

    async def restart(self, stage: str) -> list[str]:
        """See `EngineControl.restart`."""
        async with self._lock:
            hosts = self._hosts(stage, "ready")
            for host in hosts:
                await self._restart(host)
            return _stages(hosts)

    async def _restart(self, host: HostPlan) -> None:
        self._mark([host], "draining", planned=True)
        try:
            await self._until(lambda: self._at_rest(host), _stages([host]))
        except OmniError:
            self._mark([host], "ready", planned=False)
            raise
        await self._runtime.retire(host)
        await self._runtime.revive(host)

    def _hosts(self, stage: str, state: str) -> list[HostPlan]:
        """The processes of a stage, all of whose replicas are in `state`."""
        hosts = self._runtime.hosts_of(stage)
        if not hosts:
            raise RequestError("stage: no such stage", param="stage")
        for host in hosts:
            for replica in (self._runtime.replicas[each] for each in host.replicas):
                if replica.state != state:
                    text = f"stage {replica.id.stage} is {replica.state}, not {state}"
                    raise RequestError(text, param="stage", stage=replica.id.stage)
        return hosts

    def _mark(self, hosts: list[HostPlan], state: str, *, planned: bool) -> None:
        for host in hosts:
            for replica in (self._runtime.replicas[each] for each in host.replicas):
                replica.planned = planned
                if replica.state in ("ready", "draining"):
                    replica.state = "draining" if state == "draining" else "ready"
                if replica.ready:
                    self._orchestrator.on_ready(replica)

    def _at_rest(self, host: HostPlan) -> bool:
        """No live request is at the process, and no chunk of or for it is outstanding."""
        loads = [self._runtime.replicas[each].load for each in host.replicas]
        return not any(loads) and not self._orchestrator.handles(frozenset(host.replicas))

    async def _until(self, true: Callable[[], bool], stages: list[str]) -> None:
        limit = self._config.limits.drain_timeout_s
        try:
            async with asyncio.timeout(limit):
                while not true():
                    await asyncio.sleep(LOOK_AGAIN_S)
        except TimeoutError:
            text = f"{', '.join(stages)} still had work after limits.drain_timeout_s = {limit:g} s"
            raise OmniError(text, code=ErrorCode.UNAVAILABLE, stage=stages[0], retry_after_s=limit) from None


def _stages(hosts: list[HostPlan]) -> list[str]:
    return list(dict.fromkeys(replica.stage for host in hosts for replica in host.replicas))
