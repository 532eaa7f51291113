"""Does what a block of a page tells its reader to do."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from omnistage.config.resolve import resolve_config
from tests.docs.pages import Block
from tests.servers import Server, serving

ADDRESS = "http://127.0.0.1:8000"
STOPPED = "stopped"
BLOCK_TIMEOUT_S = 120.0
# What a reader sees by looking, a test must be told by the exit status.
CURLRC = 'fail-with-body\nsilent\nshow-error\nmax-time = 60\nnoproxy = "*"\n'
START = ("omnistage serve ", "make serve")


class Servers:
    """Servers by the command that starts them, each started once; those that use files of a page belong to it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._running: dict[tuple[str, Path | None], Server] = {}

    def get(self, command: str, cwd: Path) -> Server:
        words = shlex.split(command, comments=True)
        own = len(words) > 3 or any((cwd / word).exists() for word in words)
        key = (command, cwd if own else None)
        if key not in self._running:
            home = self._folder / f"server{len(self._running)}"
            home.mkdir()
            self._running[key] = self._stack.enter_context(serving(home, *words[2:], cwd=cwd))
        return self._running[key]

    def close(self) -> None:
        """Ends all at once."""
        for server in self._running.values():
            server.process.terminate()
        for server in self._running.values():
            server.process.wait(30)


class Reader:
    """Reads one page from top to bottom in a folder of its own."""

    def __init__(self, folder: Path, servers: Servers) -> None:
        self._folder, self._servers = folder, servers
        self._server: Server | None = None
        (folder / ".curlrc").write_text(CURLRC)

    def read(self, block: Block) -> None:
        """Raises AssertionError, or what the block's code raises, when it does not do as the page says."""
        if "server" in block.notes:
            self._talk_to(block.notes["server"])
        if "not run" in block.notes:
            return
        text = block.text if self._server is None else block.text.replace(ADDRESS, self._server.address)
        if "file" in block.notes:
            file = self._folder / block.notes["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        {"python": self._python, "bash": self._bash, "json": self._json, "yaml": self._yaml, "text": self._text}[
            block.language
        ](block, text)

    def _talk_to(self, command: str) -> None:
        if command != STOPPED:
            self._server = self._servers.get(command, self._folder)
            return
        assert self._server is not None
        self._server.process.send_signal(signal.SIGTERM)
        assert self._server.process.wait(30) == 0
        self._server = None

    def _python(self, block: Block, text: str) -> None:
        file = self._folder / block.notes.get("file", f"line{block.line}.py")
        file.write_text(text)
        with contextlib.chdir(self._folder), contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(file.name, run_name=file.stem)

    def _bash(self, block: Block, text: str) -> None:
        if text.startswith(START):
            command = "omnistage serve smol-speech" if text.startswith("make") else text.strip()
            assert "\n" not in command, "a server is started by a block of one line"
            self._talk_to(command)
            return
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self._folder,
            env=os.environ | {"PATH": path, "CURL_HOME": str(self._folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=BLOCK_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]

    def _json(self, block: Block, text: str) -> None:
        for body in documents(text):
            if route := block.notes.get("post"):
                assert self._server is not None, f"{block.where}: to which server?"
                answer = httpx.post(self._server.address + route, json=body, timeout=60, trust_env=False)
                assert answer.status_code == 200, answer.text

    def _yaml(self, block: Block, text: str) -> None:
        file = self._folder / f"deploy{block.line}.yaml"
        file.write_text(text)
        resolve_config(block.notes.get("model", "smol-speech"), file)

    def _text(self, block: Block, text: str) -> None:
        """Nothing to do: pictures, output, and synopses, which have a test of their own."""


def documents(text: str) -> list[Any]:
    """One JSON document, or one per line."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
