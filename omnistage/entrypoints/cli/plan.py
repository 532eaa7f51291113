"""`omnistage plan`: what a deployment would start and what memory it takes, without loading anything."""

from __future__ import annotations

import argparse
import subprocess

import msgspec

from omnistage.config.registry import load_pipeline
from omnistage.config.resolve import detect_platform, resolve_config
from omnistage.entrypoints.cli.main import overrides_of
from omnistage.ops.layout_rule import physical_memory
from omnistage.runtime.memory_plan import CPU, MIB, MemoryPlan, StageMemory, decided, memory_plan

_NVIDIA = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_HEADS = (
    "stage", "replicas", "device", "dtype", "weights", "KV", "other", "rest", "step", "peak", "caches", "arena",
    "streams",
)  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 when what a stage always holds does not fit."""
    config = resolve_config(arguments.model, arguments.deploy, overrides_of(arguments))
    asked = arguments.memory_mb
    devices = {CPU, *(decided(stage).device for stage in config.stages.values())}
    limits = device_memory() if asked is None else dict.fromkeys(sorted(devices), asked * MIB)
    plan = memory_plan(config, load_pipeline(config.pipeline), limits, arguments.tokens)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(plan)).decode())
    else:
        print(table(plan, limits))
    return 1 if plan.lacks else 0


def device_memory() -> dict[str, int]:
    """Bytes of the host, and of the NVIDIA devices where their tool tells."""
    limits = {CPU: physical_memory()}
    if detect_platform() != CPU:
        try:
            told = subprocess.run(_NVIDIA, capture_output=True, text=True, timeout=1.5, check=True).stdout
            limits |= {f"cuda:{index}" if index else "cuda": int(mib) * MIB for index, mib in enumerate(told.split())}
        except (OSError, subprocess.SubprocessError, ValueError):
            return limits
    return limits


def table(plan: MemoryPlan, limits: dict[str, int]) -> str:
    """For people. Sizes in MiB."""
    stages = _columns([_HEADS, *(_row(stage) for stage in plan.stages)])
    lines = [f"{plan.pipeline}, variant {plan.variant}; memory in MiB, of each replica", "", *stages, ""]
    rows: list[tuple[str, ...]] = [("process", "stages", "threads", "empty", "in all")]
    for process in plan.processes:
        taken = ", ".join(f"{_mib(nbytes)} {device}" for device, nbytes in process.taken.items())
        names = ", ".join(process.stages) or "none"
        rows.append((process.name, names, str(process.threads), _mib(process.base), taken))
    lines += [*_columns(rows), "", f"shared memory of hand-offs: {_mib(plan.arenas)}"]
    for device, nbytes in plan.total.items():
        limit = f" of {_mib(limits[device])}" if device in limits else ", not checked: give --memory-mb"
        lines.append(f"{device}: {_mib(nbytes)}{limit}")
    lines += [f"{stage.name}: its model declares no memory; not counted" for stage in plan.stages if stage.need is None]
    lines += [f"{name}: not on this machine yet, so not counted; the first start fetches it" for name in plan.missing]
    lines += [
        f"does not fit: stage {lack.stage}; {lack.device} has {_mib(lack.limit)} MiB, {_mib(lack.nbytes)} too little"
        for lack in plan.lacks
    ]
    lines += [
        f"tight: full steps and caches of all stages at once take {_mib(lack.nbytes)} MiB more than the "
        f"{_mib(lack.limit)} of {lack.device}, most in {lack.stage}; lower token_budget, max_num_seqs or its caches"
        for lack in plan.tight
    ]
    return "\n".join(lines if plan.lacks else [*lines, "fits"])


def _row(stage: StageMemory) -> tuple[str, ...]:
    kv = f"{_mib(stage.kv.nbytes)} ({stage.kv.tokens} tokens)" if stage.kv is not None else "-"
    length = f" of {stage.stream_tokens}" if stage.stream_tokens else ""
    return (
        stage.name,
        str(stage.replicas),
        stage.device,
        f"{stage.dtype} {stage.layout}".strip(),
        _mib(sum(stage.weights.values())) if stage.need is not None else "?",
        kv,
        _mib(sum(stage.extra.values())),
        _mib(stage.rest) if stage.rest is not None else "?",
        f"{_mib(stage.working.nbytes)} ({stage.working.of})" if stage.working.nbytes else "-",
        _mib(stage.peak) if stage.peak is not None else "?",
        _mib(sum(stage.caches.values())) if stage.caches else "-",
        _mib(stage.arena),
        f"{stage.streams}{length}",
    )


def _mib(nbytes: int) -> str:
    return str(round(nbytes / MIB))


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
