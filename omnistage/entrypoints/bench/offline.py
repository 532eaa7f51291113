"""The same load on an engine in this process: no HTTP in between."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import msgspec

from omnistage.engine.client import EngineClient
from omnistage.entrypoints.bench.pictures import flaw_of
from omnistage.entrypoints.bench.sample import Sample
from omnistage.entrypoints.bench.target import Task
from omnistage.errors import OmniError, RequestError
from omnistage.media.audio_encode import PCM_RATE
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, OmniRequestOutput

_MODALITIES: dict[Task, tuple[str, ...]] = {
    "chat": ("text",),
    "chat-audio": ("text", "audio"),
    "speech": ("audio",),
    "image": ("image",),
    "video": ("video",),
}


class OfflineTarget:
    """A running engine. `extra` are fields of the request; raises RequestError for one that requests do not have."""

    def __init__(self, engine: EngineClient, task: Task, extra: dict[str, Any]) -> None:
        self._engine, self._task = engine, task
        kind = "chat" if task == "chat-audio" else task
        drawn = task in ("image", "video")
        fields = {"id": "bench", "task": kind, "modalities": _MODALITIES[task], "prompt": "", "progress": drawn}
        try:
            self._request = msgspec.convert(fields | extra, OmniRequest)
        except msgspec.ValidationError as error:
            raise RequestError(f"--extra-body: {error}", param="extra_body") from None

    async def ask(self, prompt: str) -> Sample:
        """A failure of the engine is in the sample's `error`, by its code."""
        request = msgspec.structs.replace(self._request, id=uuid4().hex, prompt=prompt)
        sample, started = Sample(), time.perf_counter()
        try:
            await self._read(self._engine.generate(request), sample, started)
        except OmniError as error:
            sample.error = error.info.code.value
        sample.end = time.perf_counter() - started
        wanted = {"text": sample.texts, "audio": sample.audio, "image": sample.images, "video": sample.video_s}
        missing = [name for name in _MODALITIES[self._task] if not wanted[name]]
        sample.error = sample.error or (f"no {missing[0]}" if missing else "")
        return sample

    async def _read(self, outputs: AsyncIterator[OmniRequestOutput], sample: Sample, started: float) -> None:
        writer, loud = "", False
        async for output in outputs:
            now = time.perf_counter() - started
            if output.text:
                writer = output.stage
                sample.texts.append(now)
            if output.payload is not None:
                loud = self._sound(output, sample, now) or loud
                _seen(output.modality, output.payload, sample, now)
                output.payload.release()
            if output.error is not None:
                sample.error = output.error.code.value
            if output.metrics is not None:
                sample.stages = output.metrics.stages
        if sample.audio and not loud:
            sample.error = sample.error or "silent audio"
        if writer in sample.stages:
            sample.tokens = sample.stages[writer].output_tokens

    def _sound(self, output: OmniRequestOutput, sample: Sample, now: float) -> bool:
        """Notes a packet; True when there is more than silence in it."""
        payload = output.payload
        if payload is None or "audio" not in payload.tensors or not payload["audio"].shape[-1]:
            return False
        rate = int(payload.meta.get("sample_rate", self._engine.pipeline.sample_rate or PCM_RATE))
        sample.audio.append((now, payload["audio"].shape[-1] / rate))
        return bool(payload["audio"].any())


def _seen(modality: str, payload: MultimodalPayload, sample: Sample, now: float) -> None:
    """Notes news of the progress, pictures, and pieces of a video."""
    if modality == "progress":
        sample.steps.append(now)
    if modality not in ("image", "video") or modality not in payload.tensors:
        return
    pixels = payload[modality]
    flaw = flaw_of(pixels)
    sample.error = sample.error or (f"{modality}: {flaw}" if flaw else "")
    if modality == "image":
        sample.images += [now] * len(pixels)
    else:
        sample.video_s += len(pixels) / float(payload.meta["fps"])
