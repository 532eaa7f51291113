"""What a deployment takes of memory: per stage, per process, per device; and what does not fit. Sizes in bytes.

From the launch plan and the footprints that the model's folder declares alone: nothing is loaded, no torch imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from omnistage.config.footprint import PROCESS_MB, Footprint, KvShape, Working
from omnistage.config.model import OmniConfig, PipelineConfig, StageConfig
from omnistage.config.resolve import detect_platform
from omnistage.errors import ConfigError
from omnistage.runtime.plan import MAIN_HOST, HostPlan, host_plans, variant_of
from omnistage.runtime.stage_runtime import CLIENT_ARENA_MB

MIB = 1 << 20
CPU = "cpu"
# Resident MiB of the engine's own process, the HTTP front included.
ENGINE_MB = 90
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvMemory(msgspec.Struct, frozen=True):
    """The paged cache of one replica; `nbytes` of the `kv_memory_mb` are whole blocks."""

    nbytes: int
    blocks: int
    tokens: int


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a stage, what it takes beyond an empty process: `rest` once it is ready and waits, `peak` the most
    at any time, in full steps or while it loads, both with pages of mapped weight files and with empty `caches`; `need`
    with full steps and full caches, without pages that the kernel takes back. None when its model declares nothing.

    `streams` are requests of `stream_tokens` positions that all replicas hold at once (0 tokens: any length): as many
    as `max_num_seqs`, the KV cache and the working memory on a limited device leave.
    """

    name: str
    replicas: int
    device: str
    dtype: str
    layout: str
    weights: dict[str, int]
    extra: dict[str, int]
    caches: dict[str, int]
    working: Working
    kv: KvMemory | None
    arena: int
    rest: int | None
    peak: int | None
    need: int | None
    streams: int
    stream_tokens: int
    missing: tuple[str, ...] = ()


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One process: `base` before anything is loaded; `taken` by device, `base` included, without shared memory;
    `working` is the part of it that only full steps and full caches take."""

    name: str
    stages: tuple[str, ...]
    threads: int
    base: int
    taken: dict[str, int]
    working: dict[str, int]


class Lack(msgspec.Struct, frozen=True):
    """`stage` is the first, in the order of the graph, that `device` has no room for; `nbytes` are missing in all."""

    device: str
    stage: str
    nbytes: int
    limit: int


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`arenas` is shared memory of the host; `total` sums processes and arenas by device.

    `lacks`: what serving always holds does not fit, so the deployment cannot run. `tight`: it fits, but not all full
    steps at once; smaller steps do.
    """

    pipeline: str
    variant: str
    stages: list[StageMemory]
    processes: list[ProcessMemory]
    arenas: int
    total: dict[str, int]
    lacks: list[Lack]
    tight: list[Lack]

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for stage in self.stages for name in stage.missing)


def decided(stage: StageConfig, dtype: str | None = None) -> StageConfig:
    """The stage with its device ("cuda" is the first one) and dtype. An "auto" dtype is `dtype`, else what is known
    without a probe: bfloat16 on accelerators, on a CPU float32, the larger of the two that a probe may choose."""
    device = detect_platform() if stage.device == "auto" else stage.device.removesuffix(":0")
    plain = "float32" if device == CPU else "bfloat16"
    chosen = stage.dtype if stage.dtype != "auto" else dtype or plain
    return msgspec.convert(msgspec.structs.asdict(stage) | {"device": device, "dtype": chosen}, StageConfig)


def footprint_of(config: OmniConfig, pipeline: PipelineConfig, stage: StageConfig) -> Footprint | None:
    """None for a pipeline that declares none. Raises OmniError for a damaged checkpoint."""
    if pipeline.footprint is None:
        return None
    try:
        return pipeline.footprint(config, stage)
    except KeyError as error:
        raise ConfigError(f"model: the checkpoint's configuration lacks {error.args[0]!r}", param="model") from None


def memory_plan(
    config: OmniConfig, pipeline: PipelineConfig, limits: Mapping[str, int], stream_tokens: int = 0
) -> MemoryPlan:
    """`limits` are bytes by device; one that is not named is not checked. `stream_tokens` is the typical length of a
    request in positions of an AR stage, 0 for the longest that the stage takes."""
    specs = variant_of(config, pipeline).stages
    stages = {spec.name: decided(config.stages[spec.name]) for spec in specs}
    found = {name: footprint_of(config, pipeline, stage) for name, stage in stages.items()}
    prints = {
        spec.name: found[spec.name] or Footprint(weights={}, library="torch" if spec.torch else "python")
        for spec in specs
    }
    rows = [_stage_memory(stages[name], each, found[name] is None, stream_tokens) for name, each in prints.items()]
    processes = [_process(host, stages, prints) for host in _hosts(config)]
    arenas = sum(row.arena * row.replicas for row in rows) + CLIENT_ARENA_MB * MIB
    total = Counter({CPU: arenas})
    for process in processes:
        total.update(process.taken)
    short = {device: nbytes - limits[device] for device, nbytes in total.items() if device in limits}
    lacks, tight = _lacks(processes, rows, short, limits)
    names = {"pipeline": config.pipeline, "variant": config.variant}
    rows = [_with_fewer_streams(rows, row, short.get(row.device, 0)) for row in rows]
    return MemoryPlan(**names, stages=rows, processes=processes, arenas=arenas, total=total, lacks=lacks, tight=tight)


def _lacks(
    processes: list[ProcessMemory], rows: list[StageMemory], short: Mapping[str, int], limits: Mapping[str, int]
) -> tuple[list[Lack], list[Lack]]:
    """What does not fit however small the steps are, and what fits but for full steps. `short` are bytes by device."""
    working = Counter[str]()
    for process in processes:
        working.update(process.working)
    lacks, tight = list[Lack](), list[Lack]()
    for device, over in short.items():
        if over > working[device]:
            stage = _too_much(processes, rows, device, limits[device])
            lacks.append(Lack(device, stage, over - working[device], limits[device]))
        elif over > 0:
            tight.append(Lack(device, _widest(rows, device), over, limits[device]))
    return lacks, tight


def _widest(rows: list[StageMemory], device: str) -> str:
    """The stage of the device whose steps take most."""
    mine = [row for row in rows if row.device == device]
    return max(mine, key=lambda row: (row.working.nbytes + sum(row.caches.values())) * row.replicas).name


def _with_fewer_streams(rows: list[StageMemory], row: StageMemory, over: int) -> StageMemory:
    """Without the streams whose working memory, in all stages of the device together, is `over` bytes."""
    each = sum(other.working.per_stream for other in rows if other.device == row.device)
    if over <= 0 or not row.working.per_stream:
        return row
    return msgspec.structs.replace(row, streams=max(1, row.streams - -(-over // each)))


def _hosts(config: OmniConfig) -> list[HostPlan]:
    """All processes, the engine's own among them even when no stage is in it."""
    hosts = host_plans(config)
    empty = HostPlan(name=MAIN_HOST, replicas=(), threads=1)
    return hosts if any(host.is_main for host in hosts) else [empty, *hosts]


def _stage_memory(stage: StageConfig, declared: Footprint, unknown: bool, stream_tokens: int) -> StageMemory:
    kv, seqs, length = None, stage.max_num_seqs, 0
    if declared.kv is not None:
        kv = _kv(declared.kv, stage)
        longest = min(declared.kv.max_model_len, stage.max_model_len or declared.kv.max_model_len)
        length = min(stream_tokens or longest, longest)
        seqs = min(seqs, kv.tokens // length)
    rest, peak, need = (None, None, None) if unknown else _totals(declared, stage)
    return StageMemory(
        name=stage.name,
        replicas=stage.replicas,
        device=stage.device,
        dtype=stage.dtype if unknown else declared.dtype,
        layout="" if unknown else declared.layout,
        weights={name: part.held for name, part in declared.weights.items()},
        extra=declared.extra,
        caches=declared.caches,
        working=declared.working,
        kv=kv,
        arena=stage.arena_mb * MIB,
        rest=rest,
        peak=peak,
        need=need,
        streams=seqs * stage.replicas,
        stream_tokens=length,
        missing=declared.missing,
    )


def _totals(declared: Footprint, stage: StageConfig) -> tuple[int, int, int]:
    """`rest`, `peak` and `need` of `StageMemory`. Files are mapped into the host's memory, not an accelerator's."""
    beside, parts = _beside_weights(declared, stage), list(declared.weights.values())
    held = sum(part.held for part in parts)
    need = beside + held + _passing(declared)
    if stage.device != CPU:
        late = sum(part.held for part in parts if part.late)
        return beside + held - late, beside + held + declared.working.nbytes, need
    rest = beside + sum(part.resident for part in parts if not part.late)
    full = beside + sum(part.resident for part in parts) + declared.working.nbytes
    return rest, max(full, sum(part.peak for part in parts)), need


def _passing(declared: Footprint) -> int:
    """What only full steps and full caches take."""
    return declared.working.nbytes + sum(declared.caches.values())


def _kv(shape: KvShape, stage: StageConfig) -> KvMemory:
    block = shape.width * _ITEM_BYTES[stage.dtype] * stage.block_size
    blocks = stage.kv_memory_mb * MIB // block
    return KvMemory(blocks * block, blocks, blocks * stage.block_size)


def _beside_weights(declared: Footprint, stage: StageConfig) -> int:
    kv = _kv(declared.kv, stage).nbytes if declared.kv is not None else 0
    return kv + sum(declared.extra.values())


def _process(host: HostPlan, stages: Mapping[str, StageConfig], prints: Mapping[str, Footprint]) -> ProcessMemory:
    """Components that stages of a process share count once in it."""
    names = tuple(replica.stage for replica in host.replicas)
    base = max((PROCESS_MB[prints[name].library] for name in names), default=PROCESS_MB["python"])
    base += ENGINE_MB - PROCESS_MB["python"] if host.is_main else 0
    taken, working = {CPU: base * MIB}, Counter[str]()
    seen: set[str] = set()
    for name in names:
        declared, device = prints[name], stages[name].device
        parts = {key: part for key, part in declared.weights.items() if not (declared.shared and key in seen)}
        seen |= parts.keys()
        held = _beside_weights(declared, stages[name]) + sum(part.held for part in parts.values())
        taken[device] = taken.get(device, 0) + held + _passing(declared)
        working[device] += _passing(declared)
    return ProcessMemory(
        name=host.name, stages=names, threads=host.threads, base=base * MIB, taken=taken, working=dict(working)
    )


def _too_much(processes: list[ProcessMemory], rows: list[StageMemory], device: str, limit: int) -> str:
    """The first stage, process by process in the order of the graph, whose weights and caches exceed what is left of
    the device."""
    taken = CLIENT_ARENA_MB * MIB if device == CPU else 0
    arenas = {row.name: row.arena for row in rows} if device == CPU else {}
    for process in processes:
        taken += process.taken.get(device, 0) - process.working.get(device, 0)
        taken += sum(arenas.get(stage, 0) for stage in process.stages)
        if taken > limit:
            return "+".join(dict.fromkeys(process.stages)) or "the engine itself"
    return rows[-1].name
