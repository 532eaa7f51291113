"""Sends one request to a server of the OpenAI routes, notes when what came, and checks what came."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import numpy as np

from omnistage.entrypoints.bench.answer import Audio, BadAnswer, ChatEvent, Delta, check_error, event_of, stages_of
from omnistage.entrypoints.bench.pictures import ImageAsk, VideoAsk
from omnistage.entrypoints.bench.sample import Sample
from omnistage.errors import RequestError
from omnistage.media.audio_encode import PCM_RATE

Task = Literal["chat", "chat-audio", "speech", "image", "video"]
_ROUTES = {
    "chat": "/v1/chat/completions",
    "chat-audio": "/v1/chat/completions",
    "speech": "/v1/audio/speech",
    "image": "/v1/images/generations",
    "video": "/v1/videos",
}


class Target:
    """A server at `url`, with or without the "/v1" of its routes. `extra` is merged into every body.

    Raises RequestError for a `url` that is none.
    """

    def __init__(self, client: httpx.AsyncClient, url: str, model: str, task: Task, extra: dict[str, Any]) -> None:
        self._client = client
        self._url = _base(url) + _ROUTES[task]
        self._model, self._task, self._extra = model, task, extra

    async def ask(self, prompt: str) -> Sample:
        """A failure of any kind is in the sample's `error`."""
        sample, started = Sample(), time.perf_counter()
        body = self._body(prompt)
        try:
            check = await self._read(sample, started, body)
        except httpx.HTTPStatusError as error:
            sample.error = _refusal(error.response)
        except BadAnswer as error:
            sample.error = str(error)
        except (httpx.HTTPError, ValueError) as error:
            sample.error = type(error).__name__
        sample.end = time.perf_counter() - started
        if not sample.error:
            await asyncio.to_thread(check)
        return sample

    async def _read(self, sample: Sample, started: float, body: dict[str, Any]) -> Callable[[], None]:
        """Reads the whole answer; gives what checks it afterwards, so that looking costs the figures nothing."""
        if self._task == "video":
            job = VideoAsk(sample, started, body.get("num_frames"))
            await job.run(self._client, self._url, body)
            return job.check
        image = self._task == "image"
        reader = ImageAsk(sample, started, body.get("n", 1)) if image else _Reader(sample, started, self._task)
        async with self._client.stream("POST", self._url, json=body) as answer:
            if answer.is_error:
                await answer.aread()
            answer.raise_for_status()
            await reader.read(answer)
        return reader.check

    def _body(self, prompt: str) -> dict[str, Any]:
        if self._task in ("image", "video"):
            return {"model": self._model, "prompt": prompt} | self._extra
        if self._task == "speech":
            return {"model": self._model, "input": prompt, "response_format": "pcm"} | self._extra
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._task == "chat-audio":
            body |= {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
        return body | self._extra


def _base(url: str) -> str:
    split = urlsplit(url)
    if split.scheme not in ("http", "https") or not split.netloc:
        raise RequestError(f"--url {url}: write http://HOST:PORT", param="url")
    return url.rstrip("/").removesuffix("/v1")


def _refusal(answer: httpx.Response) -> str:
    """The status, and what an error of OpenAI's shape says."""
    try:
        told = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
    return f"status {answer.status_code}: {told[:120]}"


class _Reader:
    """Reads one answer into a sample."""

    def __init__(self, sample: Sample, started: float, task: Task) -> None:
        self._sample, self._started, self._task = sample, started, task
        self._loudest = 0
        self._odd = b""
        self._finished = task == "speech"

    async def read(self, answer: httpx.Response) -> None:
        if self._task == "speech":
            async for data in answer.aiter_raw():
                self._sound(data)
        else:
            async for line in answer.aiter_lines():
                self._line(line)

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _line(self, line: str) -> None:
        event = event_of(line, ChatEvent)
        if event is None:
            return
        check_error(event.error)
        if event.usage is not None:
            self._sample.tokens = event.usage.completion_tokens
        for choice in event.choices or ():
            self._finished = self._finished or choice.finish_reason is not None
            self._sample.stages = stages_of(choice.metrics) or self._sample.stages
            self._delta(choice.delta or Delta())

    def _delta(self, delta: Delta) -> None:
        audio = delta.audio or Audio()
        if delta.content or audio.transcript:
            self._sample.texts.append(self._now())
        if audio.data:
            self._sound(base64.b64decode(audio.data))

    def _sound(self, data: bytes) -> None:
        whole = self._odd + data
        cut = len(whole) // 2 * 2
        self._odd = whole[cut:]
        if cut:
            samples = np.frombuffer(whole[:cut], "<i2")
            self._loudest = max(self._loudest, int(np.abs(samples.astype(np.int32)).max()))
            self._sample.audio.append((self._now(), len(samples) / PCM_RATE))

    def check(self) -> None:
        """An answer without text, sound or end is an error, whatever its status."""
        if not self._finished:
            self._sample.error = "no finish reason"
        elif self._task != "speech" and not self._sample.texts:
            self._sample.error = "no text"
        elif self._task != "chat" and (not self._sample.audio or self._odd):
            self._sample.error = "no audio" if not self._sample.audio else "audio ends within a sample"
        elif self._task != "chat" and self._loudest == 0:
            self._sample.error = "silent audio"
