"""A real Prometheus of its own storage and port, and its tool; tests skip where Debian's package is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

START_S = 60.0
Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]


def binary(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def promtool(*arguments: str, given: str = "") -> str:
    """What the tool prints. Raises AssertionError with it where the tool is not content."""
    done = subprocess.run(
        [binary("promtool"), *arguments], input=given, text=True, timeout=60,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def store(folder: Path, scrapes: Sequence[tuple[float, str]]) -> None:
    """Writes scrapes (Unix time in s, text exposition), oldest first, into the storage of a server to be started."""
    lines = [f"{line} {moment}\n" for moment, text in scrapes for line in text.splitlines() if not line.startswith("#")]
    file = folder / "scrapes.om"
    file.write_text("".join(lines) + "# EOF\n")
    promtool("tsdb", "create-blocks-from", "openmetrics", str(file), str(folder / "data"))


class Prometheus:
    """A running server."""

    def __init__(self, address: str) -> None:
        self._http = httpx.Client(base_url=address, timeout=30, trust_env=False)

    def ask(self, query: str, moment: float | None = None) -> Vector:
        """Values by label pairs, at a Unix time in s or now. Raises httpx.HTTPStatusError for what is no query."""
        given = {"query": query} | ({} if moment is None else {"time": str(moment)})
        answer = self._http.get("/api/v1/query", params=given).raise_for_status().json()
        assert answer["data"]["resultType"] == "vector"
        return {frozenset(one["metric"].items()): float(one["value"][1]) for one in answer["data"]["result"]}

    def wait_for(self, query: str) -> Vector:
        """The first answer that is not empty."""
        deadline = time.monotonic() + START_S
        while not (found := self.ask(query)):
            assert time.monotonic() < deadline, query
            time.sleep(0.05)
        return found

    def close(self) -> None:
        self._http.close()


@contextmanager
def running(folder: Path, config: str) -> Iterator[Prometheus]:
    """A server with this configuration (YAML) over `folder`/data, on a port of the system's choice."""
    (folder / "prometheus.yml").write_text(config)
    log = folder / "prometheus.log"
    command = [
        binary("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        server = Prometheus(_address(process, log))
        yield server
        server.close()
    finally:
        process.kill()
        process.wait(10)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where a server listens that is ready. Raises AssertionError with its log where it ends or takes too long."""
    deadline = time.monotonic() + START_S
    while "ready to receive web requests" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    (port,) = re.findall(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', log.read_text())
    return f"http://127.0.0.1:{port}"
