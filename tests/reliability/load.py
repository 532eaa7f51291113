"""Load on a server under fault: mixed requests of known answers, and a watch on /ready."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from omnistage.testing.closed_form import text_of_wave

TEXT = "a sentence of some length to be spoken out"


@dataclass
class Outcome:
    """One answer: `right` says that it is the whole right one; times on the monotonic clock."""

    kind: str
    right: bool
    ended: float
    error: dict[str, Any] | None = None


@dataclass
class Watch:
    """When /ready was first seen false, and when it was true again after that."""

    down: float = 0.0
    up: float = 0.0
    polls: list[bool] = field(default_factory=list)


def body(kind: str, index: int) -> tuple[str, dict[str, Any], str]:
    """Route, body and the text that the answer stands for."""
    text = f"{TEXT} {index}"
    if kind == "speech":
        return "/v1/audio/speech", {"input": text, "response_format": "pcm", "voice": "echo"}, text
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "modalities": ["text"]}
    if "audio" in kind:
        chat |= {"modalities": ["text", "audio"], "audio": {"format": "pcm16", "voice": "echo"}}
    return "/v1/chat/completions", chat | {"stream": "stream" in kind}, text


async def ask(http: httpx.AsyncClient, kind: str, index: int) -> Outcome:
    """Asks and judges the answer, sample for sample where it is sound."""
    path, request, text = body(kind, index)
    error: dict[str, Any] | None = None
    right = False
    try:
        reply = await http.post(path, json=request)
        if reply.status_code != 200:
            error = reply.json()["error"]
        elif kind == "speech":
            right = spoken(reply.content) == text
        elif "stream" in kind:
            right, error = judge_events(reply.text, text, with_audio="audio" in kind)
        else:
            message = reply.json()["choices"][0]["message"]
            sound = spoken(base64.b64decode(message["audio"]["data"])) if "audio" in kind else text
            right = (message["content"] or message["audio"]["transcript"]) == sound == text
    except httpx.RemoteProtocolError:
        error = {"code": "cut"}  # a raw stream of sound can only be cut
    return Outcome(kind, right, time.monotonic(), error)


def spoken(pcm: bytes) -> str:
    """The text of 16-bit samples; levels lie 1/2048 apart, far above the rounding."""
    return text_of_wave(np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32767))


def judge_events(stream: str, text: str, *, with_audio: bool) -> tuple[bool, dict[str, Any] | None]:
    rows = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    for row in rows:
        if "error" in row:
            return False, row["error"]
    deltas = [choice["delta"] for row in rows for choice in row["choices"]]
    words = "".join(delta.get("content") or "" for delta in deltas)
    sounds = [delta["audio"] for delta in deltas if delta.get("audio")]
    said = "".join(sound.get("transcript", "") for sound in sounds)
    if not with_audio:
        return words == text, None
    pcm = b"".join(base64.b64decode(sound.get("data", "")) for sound in sounds)
    return spoken(pcm) == (words or said) == text, None


@asynccontextmanager
async def watching(http: httpx.AsyncClient, watch: Watch) -> AsyncIterator[None]:
    """Polls /ready during the block and, once it was false, until it is true again."""
    task = asyncio.create_task(_watch(http, watch))
    try:
        yield
    finally:
        if not watch.down:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _watch(http: httpx.AsyncClient, watch: Watch) -> None:
    while not watch.up:
        ready = (await http.get("/ready")).status_code == 200
        watch.polls.append(ready)
        if not ready and not watch.down:
            watch.down = time.monotonic()
        elif ready and watch.down:
            watch.up = time.monotonic()
        await asyncio.sleep(0.01)


async def restarts_of(http: httpx.AsyncClient, stage: str) -> float:
    text = (await http.get("/metrics")).text
    name = f'omnistage_stage_restarts{{replica="0",stage="{stage}"}}'
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))
