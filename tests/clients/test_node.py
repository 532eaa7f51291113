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
def client_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """The scripts beside the package of the client; None where there is no network."""
    folder = tmp_path_factory.mktemp("node")
    installed = npm.install(FOLDER, folder)
    for script in FOLDER.glob("*.mjs"):
        shutil.copy(script, folder)
    yield folder if installed else None
    shutil.rmtree(folder / "node_modules", ignore_errors=True)


def passes(script: str, folder: Path, environment: dict[str, str]) -> None:
    done = npm.run(script, folder, os.environ | environment)
    assert (done.returncode, done.stdout.strip()) == (0, "all right"), done.stderr


def test_node_script_passes_or_what_it_sent_is_answered_as_then(
    client_folder: Path | None, addresses: dict[str, str]
) -> None:
    recorded = FOLDER / "recorded.jsonl"
    if client_folder is None:
        send_again(recorded, addresses)
        return
    sent = client_folder / "recorded.jsonl"
    passes("script.mjs", client_folder, addresses | {"RECORD": str(sent)})
    assert routes_of(sent) == routes_of(recorded), "the recording is not of this script"


def test_node_realtime_script_passes(client_folder: Path | None, addresses: dict[str, str]) -> None:
    if client_folder is None:
        pytest.skip("the npm registry cannot be reached")
    passes("realtime.mjs", client_folder, addresses)


def entries_of(recording: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in recording.read_text().splitlines()]


def routes_of(recording: Path) -> set[tuple[str, str, str]]:
    """Server, method and path of each exchange; video jobs are alike."""
    return {(each["server"], each["method"], VIDEO_ID.sub("ID", each["path"])) for each in entries_of(recording)}


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


def send_again(recording: Path, addresses: dict[str, str]) -> None:
    """Raises AssertionError where an answer has another status, type or shape than when it was recorded."""
    entries = entries_of(recording)
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
