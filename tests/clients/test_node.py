"""The official openai-node client: its scripts, and what it sent where the package cannot be installed.

`node/recorded.jsonl` is what `RECORD=... node script.mjs` wrote: each exchange of the client with servers on which the
script passed. A server to which the same bytes give the same statuses, types and shapes of answers serves that client.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients import npm

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parent / "node"
VIDEO_ID = re.compile(r"video_[0-9a-f]{24}")


@pytest.fixture(scope="module")
def client_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The scripts beside the package of the client."""
    folder = tmp_path_factory.mktemp("node")
    npm.install(FOLDER, folder)
    for script in FOLDER.glob("*.mjs"):
        shutil.copy(script, folder)
    yield folder
    shutil.rmtree(folder / "node_modules")


@pytest.mark.parametrize("script", ["script.mjs", "realtime.mjs"])
def test_node_script_passes(client_folder: Path, addresses: dict[str, str], script: str) -> None:
    record = {"RECORD": str(client_folder / "recorded.jsonl")}
    done = npm.run(script, client_folder, os.environ | addresses | record)
    assert (done.returncode, done.stdout.strip()) == (0, "all right"), done.stderr


def shape(value: Any, path: str = "") -> set[str]:
    """The paths of a JSON value with the types of its leaves; null says nothing about a type."""
    if isinstance(value, dict):
        return {path} | {found for key, inner in value.items() for found in shape(inner, f"{path}.{key}")}
    if isinstance(value, list):
        return {path} | {found for inner in value for found in shape(inner, f"{path}[]")}
    return {path} if value is None else {path, f"{path}:{'number' if isinstance(value, int | float) else 'text'}"}


def shapes_of(kind: str, text: str) -> set[str]:
    """Of an answer or, together, of all events of a stream."""
    if kind == "application/json":
        return shape(json.loads(text))
    if kind != "text/event-stream":
        return set()
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    found = {event for event in events if event == "[DONE]"}
    return found.union(*(shape(json.loads(event)) for event in events if event != "[DONE]"))


class Replay:
    """Sends recorded requests; ids of video jobs are those of this server."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._clients = {
            name: httpx.Client(base_url=addresses[name], timeout=60, trust_env=False)
            for name in ("CHAT", "MEDIA", "EDIT")
        }
        self._ids: dict[str, str] = {}

    def send(self, entry: dict[str, Any]) -> httpx.Response:
        path = VIDEO_ID.sub(lambda found: self._ids.get(found[0], found[0]), entry["path"])
        if entry["method"] == "GET" and entry["status"] == 200 and "/video_" in path:
            self._wait_for(entry["server"], path.removesuffix("/content"))
        answer = self._clients[entry["server"]].request(
            entry["method"], path, headers=entry["headers"], content=base64.b64decode(entry["body"])
        )
        if entry["path"] == "/v1/videos" and entry["method"] == "POST":
            self._ids[json.loads(entry["text"])["id"]] = answer.json()["id"]
        return answer

    def _wait_for(self, server: str, path: str) -> None:
        deadline = time.monotonic() + 60
        while self._clients[server].get(path).json()["status"] != "completed":
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def test_what_node_sent_is_answered_as_when_it_was_recorded(addresses: dict[str, str]) -> None:
    entries = [json.loads(line) for line in (FOLDER / "recorded.jsonl").read_text().splitlines()]
    assert len(entries) > 20
    replay = Replay(addresses)
    for entry in entries:
        answer = replay.send(entry)
        where = f"{entry['method']} {entry['path']}"
        assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (
            entry["status"],
            entry["type"],
        ), where
        missing = shapes_of(entry["type"], entry["text"]) - shapes_of(
            entry["type"], answer.text if entry["text"] else ""
        )
        assert missing == set(), where
    replay.close()
