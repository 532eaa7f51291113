"""One process (or the engine's own) that hosts replicas: its start, its end, its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec
import psutil

from omnistage.config.footprint import CACHED_KERNELS
from omnistage.config.model import OmniConfig, PipelineConfig
from omnistage.connectors.inline import LocalStore
from omnistage.runtime.plan import HostPlan, ReplicaPlan, WorkerPlan
from omnistage.runtime.replica import run_replica

STOP_TIMEOUT_S = 5.0
# A stage's log is no place for the progress bars of model libraries.
_QUIET = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_TELEMETRY": "1"}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# What a process holds beside its tensors is bounded. oneDNN keeps so many compiled kernels (0.6 MB each for a linear
# layer and a row count; its own limit is 1024). glibc gives large buffers back once they are free (sizes in bytes).
_MEMORY = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(CACHED_KERNELS),
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 20),
}


class Host(Protocol):
    """Runs one host plan. The links of its replicas close when it ends; `wait()` then reaps it."""

    plan: HostPlan

    @property
    def pid(self) -> int | None: ...

    async def start(self, plans: list[ReplicaPlan]) -> None:
        """`plans` hold the replica ends of sockets, which pass into the host's ownership."""
        ...

    async def wait(self) -> str:
        """Reaps the host, killing what is left of it; returns how it ended, in words."""
        ...

    def kill(self) -> None:
        """Ends a host that is a process at once."""
        ...

    def worked_s(self) -> float:
        """CPU seconds that its replicas have computed."""
        ...


HostFactory = Callable[[HostPlan, OmniConfig, PipelineConfig, LocalStore], Host]


class LocalHost:
    """A process of its own, or threads of this one: see `Host`."""

    def __init__(self, plan: HostPlan, config: OmniConfig, pipeline: PipelineConfig, store: LocalStore) -> None:
        self.plan = plan
        self._config = config
        self._pipeline = pipeline
        self._store = store
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    @property
    def pid(self) -> int | None:
        if self.plan.is_main:
            return os.getpid()
        return self._process.pid if self._process is not None else None

    async def start(self, plans: list[ReplicaPlan]) -> None:
        if self.plan.is_main:
            self._start_threads(plans)
        else:
            await self._start_process(plans)

    def _start_threads(self, plans: list[ReplicaPlan]) -> None:
        prepare_process(self.plan.threads)
        self._threads = [
            threading.Thread(
                target=run_replica,
                args=(self._config, self._pipeline, plan, self._store),
                name=str(plan.replica),
                daemon=True,
            )
            for plan in plans
        ]
        for thread in self._threads:
            thread.start()

    async def _start_process(self, plans: list[ReplicaPlan]) -> None:
        ours, theirs = socket.socketpair()
        passed = {theirs.fileno()}
        for plan in plans:
            passed |= {plan.socket_fd, plan.arena_fd, *(fd for _, _, fd in plan.reads)}
        command = (sys.executable, "-m", "omnistage.runtime.worker", self.plan.name, str(theirs.fileno()))
        environment = dict(os.environ) | _environment(self.plan.threads, keep=False)
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=tuple(passed),
                env=environment,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is the parent's
            )
        finally:
            theirs.close()
            for plan in plans:
                os.close(plan.socket_fd)
        self._lifeline = ours
        worker = WorkerPlan(config=self._config, threads=self.plan.threads, replicas=plans)
        raw = msgspec.msgpack.encode(worker)
        await asyncio.to_thread(ours.sendall, len(raw).to_bytes(4, "little") + raw)

    async def wait(self) -> str:
        if self._lifeline is not None:
            self._lifeline.close()
        if self._process is not None:
            code = await asyncio.to_thread(_reap, self._process)
            return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        for thread in self._threads:
            await asyncio.to_thread(thread.join, STOP_TIMEOUT_S)
        return "its thread ended"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def worked_s(self) -> float:
        with contextlib.suppress(psutil.Error):
            if self._process is not None:
                spent = psutil.Process(self._process.pid).cpu_times()
                return spent.user + spent.system
            ids = {thread.native_id for thread in self._threads}
            return sum(each.user_time + each.system_time for each in psutil.Process().threads() if each.id in ids)
        return 0.0


def prepare_process(threads: int) -> None:
    """Sets what torch reads when it is imported, for stages in this process; nothing when it is there already."""
    if "torch" not in sys.modules:
        os.environ.update(_environment(threads, keep=True))


def _reap(process: subprocess.Popen[bytes]) -> int:
    """The exit status of a process that was told to end, killed when it does not."""
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _environment(threads: int, *, keep: bool) -> dict[str, str]:
    """Thread counts, bounds of memory and a passive wait policy, which must be set before torch is imported.

    OpenMP's default of spinning makes stages that share cores several times slower. `keep` leaves what the user set.
    """
    wanted = {name: str(threads) for name in _THREAD_VARIABLES} | _QUIET | _MEMORY | {"OMP_WAIT_POLICY": "PASSIVE"}
    return {name: value for name, value in wanted.items() if not keep or name not in os.environ}


def replica_socket() -> tuple[socket.socket, int]:
    """Our end of a new socket pair and the descriptor of the replica's end."""
    ours, theirs = socket.socketpair()
    return ours, theirs.detach()
