"""What the processes of a deployment really take, beside what `omnistage plan` says of their stages."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from omnistage.config.registry import load_pipeline
from omnistage.config.resolve import resolve_config
from omnistage.entrypoints.omni import Omni
from omnistage.runtime.memory_plan import MIB, memory_plan

# How far a prediction may be off: a share of what is measured, or so many bytes.
SHARE, TOLERANCE = 0.1, 30 * MIB
# Resident kilobytes of a stage's process that has imported everything and loaded nothing.
_EMPTY = """
import importlib, sys
import omnistage.runtime.worker, omnistage.stages.factory
importlib.import_module(sys.argv[1])
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")][0])
"""


class StagePeak(NamedTuple):
    """Bytes of one stage: the most of its own memory that was resident over an empty process, the plan's `peak`; an
    empty process, the plan's `base`."""

    stage: str
    measured: int
    predicted: int
    empty: int
    base: int

    @property
    def is_right(self) -> bool:
        return abs(self.measured - self.predicted) <= max(SHARE * self.measured, TOLERANCE)

    def __str__(self) -> str:
        return f"{self.stage}: {self.measured // MIB} MiB measured, {self.predicted // MIB} predicted"


def stage_peaks(model: str, drive: Callable[[Omni], object], settings: dict[str, Any]) -> list[StagePeak]:
    """Starts `model` with a process per stage, lets `drive` ask for what it takes, and reads what each process had."""
    config = resolve_config(model, None, settings)
    pipeline = load_pipeline(config.pipeline)
    plan = memory_plan(config, pipeline, {})
    components = {spec.name: spec.component for spec in pipeline.variants[config.variant].stages}
    with Omni(model, **settings) as omni:
        drive(omni)
        peaks = {_name_of(child): _peak_of(child) for child in psutil.Process().children() if _is_stage(child)}
    found = []
    # Processes that import the same library are equally large within a few MB: one of them is started.
    likes: dict[int, str] = {}
    bases = {process.stages[0]: process.base for process in plan.processes if process.stages}
    for stage in plan.stages:
        assert stage.peak is not None
        empty = empty_process(likes.setdefault(bases[stage.name], components[stage.name].partition(":")[0]))
        found.append(StagePeak(stage.name, peaks[stage.name] - empty, stage.peak, empty, bases[stage.name]))
    return found


@functools.cache
def empty_process(module: str) -> int:
    """Resident bytes of a worker that has imported the component's module."""
    told = subprocess.run([sys.executable, "-c", _EMPTY, module], capture_output=True, text=True, check=True)
    return int(told.stdout) << 10


def _is_stage(process: psutil.Process) -> bool:
    return "omnistage.runtime.worker" in process.cmdline()


def _name_of(process: psutil.Process) -> str:
    return process.cmdline()[3].partition("/")[0]


def _peak_of(process: psutil.Process) -> int:
    """Without shared memory, which the plan counts as arenas of the host."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    most, shared = (int(fields[name].split()[0]) << 10 for name in ("VmHWM", "RssShmem"))
    return most - shared
