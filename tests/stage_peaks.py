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
    """Bytes of its own memory that a stage has over an empty process, measured and predicted: `rested` and the plan's
    `rest`, once it is ready; `measured` and the plan's `peak`, the most. An empty process, and the plan's `base`."""

    stage: str
    rested: int
    rest: int
    measured: int
    peak: int
    empty: int
    base: int

    @property
    def rests_right(self) -> bool:
        return _is_near(self.rested, self.rest)

    @property
    def is_right(self) -> bool:
        """At rest and at full load."""
        return self.rests_right and _is_near(self.measured, self.peak)

    @property
    def is_between(self) -> bool:
        """At any load: between rest and peak."""
        within = self.rest < self.measured < self.peak
        return self.rests_right and (within or _is_near(self.measured, self.rest) or _is_near(self.measured, self.peak))

    def __str__(self) -> str:
        rested, rest, measured, peak = (n // MIB for n in (self.rested, self.rest, self.measured, self.peak))
        return f"{self.stage}: MiB measured / predicted at rest {rested} / {rest}, at the peak {measured} / {peak}"


def _is_near(measured: int, predicted: int) -> bool:
    return abs(measured - predicted) <= max(SHARE * measured, TOLERANCE)


def stage_peaks(model: str, drive: Callable[[Omni], object], settings: dict[str, Any]) -> list[StagePeak]:
    """Starts `model` with a process per stage, reads what each process has, lets `drive` ask for what it takes, and
    reads what each had at most."""
    config = resolve_config(model, None, settings)
    pipeline = load_pipeline(config.pipeline)
    plan = memory_plan(config, pipeline, {})
    components = {spec.name: spec.component for spec in pipeline.variants[config.variant].stages}
    with Omni(model, **settings) as omni:
        rested = _of_stages("VmRSS")
        drive(omni)
        peaks = _of_stages("VmHWM")
    found = []
    # Processes that import the same library are equally large within a few MB: one of them is started.
    likes: dict[int, str] = {}
    bases = {process.stages[0]: process.base for process in plan.processes if process.stages}
    for stage in plan.stages:
        assert stage.rest is not None
        assert stage.peak is not None
        empty = empty_process(likes.setdefault(bases[stage.name], components[stage.name].partition(":")[0]))
        own = rested[stage.name] - empty, stage.rest, peaks[stage.name] - empty, stage.peak
        found.append(StagePeak(stage.name, *own, empty, bases[stage.name]))
    return found


@functools.cache
def empty_process(module: str) -> int:
    """Resident bytes of a worker that has imported the component's module."""
    told = subprocess.run([sys.executable, "-c", _EMPTY, module], capture_output=True, text=True, check=True)
    return int(told.stdout) << 10


def _of_stages(field: str) -> dict[str, int]:
    """Resident bytes by stage, now ("VmRSS") or at most ("VmHWM")."""
    commands = {child.pid: child.cmdline() for child in psutil.Process().children()}
    workers = {pid: command for pid, command in commands.items() if "omnistage.runtime.worker" in command}
    return {command[3].partition("/")[0]: _resident(pid, field) for pid, command in workers.items()}


def _resident(pid: int, field: str) -> int:
    """Without shared memory, which the plan counts as arenas of the host."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    held, shared = (int(fields[name].split()[0]) << 10 for name in (field, "RssShmem"))
    return held - shared
