"""A real `omnistage serve` process for tests: OS-chosen port, ended by process id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

START_TIMEOUT_S = 240.0


class Server:
    """`address` is known once the server is ready."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.address = ""

    def wait_ready(self) -> None:
        """Raises AssertionError with the log when the server ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            lines = [line for line in self.log.read_text().splitlines() if line.startswith("http://")]
            if lines:
                self.address = lines[0]
                return
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"not ready in time: {self.log.read_text()}")

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.address + path, timeout=10)

    def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.get("/health").json()
        return answer

    def stage_pid(self, stage: str) -> int:
        """The worker process of a stage's first replica."""
        for child in psutil.Process(self.process.pid).children():
            if f"{stage}/0" in child.cmdline():
                return child.pid
        raise AssertionError(f"no process of stage {stage}")

    def ready(self) -> bool:
        return self.get("/ready").status_code == 200

    def until(self, ready: bool, timeout_s: float) -> float:
        """Seconds until /ready says so."""
        started = time.monotonic()
        while self.ready() is not ready:
            assert time.monotonic() - started < timeout_s, f"/ready is not {ready}: {self.log.read_text()[-2000:]}"
            time.sleep(0.02)
        return time.monotonic() - started


@contextmanager
def serving(folder: Path, model: str, *arguments: str, cwd: Path | None = None) -> Iterator[Server]:
    """A server that is ready; killed at the end with its children if it has not ended by itself.

    Its log is in `folder`.
    """
    log = folder / "serve.log"
    command = [sys.executable, "-m", "omnistage", "serve", model, "--port", "0", "--quiet", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=cwd)
    family: list[psutil.Process] = []
    try:
        server = Server(process, log)
        server.wait_ready()
        family = psutil.Process(process.pid).children(recursive=True)
        yield server
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        gone_within(family, 10)


def gone_within(processes: list[psutil.Process], seconds: float) -> None:
    """Raises AssertionError naming the processes that still run after so many seconds.

    One that has ended and waits for its new parent to reap it is gone: that may take seconds and is not our doing.
    """
    deadline = time.monotonic() + seconds
    alive = processes
    while alive := [process for process in alive if runs(process)]:
        assert time.monotonic() < deadline, f"left behind: {[p.pid for p in alive]}"
        time.sleep(0.005)


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
