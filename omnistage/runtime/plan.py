"""The launch plan: which process hosts which replicas, with how many threads. Pure functions of the configuration."""

from __future__ import annotations

import os

import msgspec

from omnistage.config.model import CLIENT, OmniConfig, PipelineConfig, StageConfig, Variant
from omnistage.faults import FaultSpec
from omnistage.messages import Extent

MAIN_HOST = "main"
UNLIMITED = 1 << 30


class ReplicaId(msgspec.Struct, frozen=True, array_like=True):
    stage: str
    index: int

    def __str__(self) -> str:
        return f"{self.stage}/{self.index}"


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A process and the replicas in it; the host `main` is the engine's own process. `threads` is per replica."""

    name: str
    replicas: tuple[ReplicaId, ...]
    threads: int

    @property
    def is_main(self) -> bool:
        return self.name == MAIN_HOST


class ReplicaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica needs besides the configuration. Descriptors are numbers in the process that hosts it.

    `reads` are (stage, index, arena descriptor) of the producers it reads from.
    """

    replica: ReplicaId
    socket_fd: int
    arena_fd: int
    reads: list[tuple[str, int, int]]
    inline_ports: frozenset[str]
    credits: dict[str, int]
    extents: list[Extent] = []
    faults: tuple[FaultSpec, ...] = ()


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker process is told."""

    config: OmniConfig
    threads: int
    replicas: list[ReplicaPlan]


def host_plans(config: OmniConfig) -> list[HostPlan]:
    """Groups the replicas of all stages by process. Stages that are `inline` with another follow its replicas."""
    groups: dict[str, list[ReplicaId]] = {}
    for stage in config.stages.values():
        for index in range(stage.replicas):
            groups.setdefault(_host_name(config, stage, index), []).append(ReplicaId(stage.name, index))
    share = max(1, (os.cpu_count() or 1) // len(groups))
    return [
        HostPlan(name=name, replicas=tuple(replicas), threads=_threads(config, replicas, share))
        for name, replicas in groups.items()
    ]


def _host_name(config: OmniConfig, stage: StageConfig, index: int) -> str:
    seen = {stage.name}
    while stage.co_located_with and stage.co_located_with not in seen:
        stage = config.stages[stage.co_located_with]
        seen.add(stage.name)
    return MAIN_HOST if stage.placement == "inline" else f"{stage.name}/{index}"


def _threads(config: OmniConfig, replicas: list[ReplicaId], share: int) -> int:
    return max(config.stages[replica.stage].threads for replica in replicas) or share


def host_of(hosts: list[HostPlan], replica: ReplicaId) -> HostPlan:
    return next(host for host in hosts if replica in host.replicas)


def variant_of(config: OmniConfig, pipeline: PipelineConfig) -> Variant:
    return pipeline.variants[config.variant]


def readers(config: OmniConfig, variant: Variant, source_stage: str, port: str) -> list[str]:
    """The stages (or the client) that read an output port in any request."""
    source = f"{source_stage}.{port}"
    return [edge.target_stage for edge in variant.edges if edge.source == source]


def inline_ports(config: OmniConfig, variant: Variant, hosts: list[HostPlan], host: str, stage: str) -> frozenset[str]:
    """Output ports of `stage` (hosted by `host`) whose every reader lives in the same process.

    An edge that asks for `connector: shm` is never inline.
    """
    ports = {edge.source_port for edge in variant.edges if edge.source_stage == stage}
    return frozenset(
        port
        for port in ports
        if all(_same_process(config, hosts, host, stage, reader) for reader in readers(config, variant, stage, port))
    )


def _same_process(config: OmniConfig, hosts: list[HostPlan], host: str, stage: str, reader: str) -> bool:
    edge = config.edges.get(f"{stage}->{reader}")
    if edge is not None and edge.connector == "shm":
        return False
    if reader == CLIENT:
        return host == MAIN_HOST
    homes = {plan.name for plan in hosts for replica in plan.replicas if replica.stage == reader}
    return homes == {host}


def port_credits(config: OmniConfig, variant: Variant, stage: str) -> dict[str, int]:
    """Chunks in flight per request and output port; the tightest edge decides, whole-payload edges are unlimited."""
    credits: dict[str, int] = {}
    for edge in variant.edges:
        if edge.source_stage != stage:
            continue
        settings = config.edges.get(edge.name)
        limit = UNLIMITED
        if settings is not None and settings.async_chunk:
            limit = settings.max_inflight
        credits[edge.source_port] = min(limit, credits.get(edge.source_port, UNLIMITED))
    return credits
