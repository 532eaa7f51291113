"""The stages of the embedded pipeline are killed at named points under load: each answer is right all the same."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.reliability.load import Watch, restarts_of, watching
from tests.servers import Server, serving

pytestmark = pytest.mark.slow
# Stage -> point and the hit that kills, in the first life of the stage only. They lie in different rounds: a request
# is replayed twice, not more.
KILLS = {
    "thinker": ("before_decode", 12),
    "talker": ("after_feed", 8),
    "code2wav": ("before_run", 40),
    "listener": ("after_run", 0),
}
QUESTIONS = ("What is the capital of France?", "Name two colours.", "How many days has a week?")
LEVELS = 3  # of 16 bits: batches are cut differently after a kill


def armed() -> tuple[str, ...]:
    faults = {stage: [{"point": point, "action": "kill", "after": after}] for stage, (point, after) in KILLS.items()}
    return tuple(
        part for stage, fault in faults.items() for part in ("--set", f"stages.{stage}.faults={json.dumps(fault)}")
    )


async def spoken(http: httpx.AsyncClient, question: str) -> tuple[str, bytes]:
    """Text and sound of a whole answer."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "heart", "format": "wav"},
        "temperature": 0,
        "max_tokens": 24,
        "seed": 7,
    }
    reply = await http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    audio = reply.json()["choices"][0]["message"]["audio"]
    return audio["transcript"], base64.b64decode(audio["data"])


async def heard(http: httpx.AsyncClient, wav: bytes) -> str:
    reply = await http.post("/v1/audio/transcriptions", files={"file": ("speech.wav", wav)})
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["text"]
    return text


async def round_of(http: httpx.AsyncClient) -> list[tuple[str, bytes, str]]:
    answers = await asyncio.gather(*(spoken(http, question) for question in QUESTIONS))
    texts = await asyncio.gather(*(heard(http, wav) for _, wav in answers))
    return [(text, wav, words) for (text, wav), words in zip(answers, texts, strict=True)]


async def rounds(server: Server) -> tuple[list[list[tuple[str, bytes, str]]], list[tuple[str, bytes, str]], Watch]:
    """Rounds until every stage was killed once, then one on the stages' second lives."""
    watch = Watch()
    async with httpx.AsyncClient(base_url=server.address, timeout=120, trust_env=False) as http:
        broken: list[list[tuple[str, bytes, str]]] = []
        async with watching(http, watch):
            while not all([await restarts_of(http, stage) for stage in KILLS]):
                assert len(broken) < 8, "a point was not reached"
                broken.append(await round_of(http))
        deadline = time.monotonic() + 30
        while (await http.get("/ready")).status_code != 200:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        return broken, await round_of(http), watch


def test_every_stage_killed_under_load_leaves_every_answer_as_it_was(tmp_path: Path) -> None:
    with serving(tmp_path, "smol-speech", "--set", "media.decode_processes=1", *armed()) as server:
        broken, whole, watch = asyncio.run(rounds(server))
    assert watch.down
    for answers in broken:
        for (text, wav, words), (right_text, right_wav, right_words) in zip(answers, whole, strict=True):
            assert (text, words) == (right_text, right_words)
            ours, right = (np.frombuffer(data[44:], "<i2").astype(int) for data in (wav, right_wav))
            assert ours.shape == right.shape
            assert np.abs(ours - right).max() <= LEVELS
