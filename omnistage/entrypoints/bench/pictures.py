"""Pictures and videos as a load generator's client sees them: asked for, timed, and looked at."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from omnistage.entrypoints.bench.answer import (
    ImageAnswer,
    ImageEvent,
    Job,
    check_error,
    event_of,
    read_answer,
    stages_of,
)
from omnistage.entrypoints.bench.sample import Sample
from omnistage.errors import OmniError
from omnistage.media.image import decode_image
from omnistage.media.video import decode_video

# Video jobs tell of themselves when asked: what is known of them is late by up to this, in seconds.
POLL_S = 0.02
MAX_PIXELS, MAX_FRAMES = 1 << 26, 1 << 14


def flaw_of(pixels: npt.NDArray[np.uint8]) -> str:
    """What is wrong with a picture or video, uint8 [..., H, W, 3]; "" for nothing."""
    if not pixels.size:
        return "no pixels"
    return "one flat colour" if pixels.min() == pixels.max() else ""


class ImageAsk:
    """POST /v1/images/generations, whole or (with "stream" in the body) event by event."""

    def __init__(self, sample: Sample, started: float, wanted: int) -> None:
        self._sample, self._started, self._wanted = sample, started, wanted
        self._encoded = list[str]()

    async def read(self, answer: httpx.Response) -> None:
        """Raises BadAnswer."""
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            body = read_answer(await answer.aread(), ImageAnswer)
            self._encoded = [item.b64_json for item in body.data]
            self._sample.images = [time.perf_counter() - self._started] * len(self._encoded)
            self._sample.stages = stages_of(body.metrics)
            return
        async for line in answer.aiter_lines():
            event = event_of(line, ImageEvent)
            if event is not None:
                self._event(event)

    def _event(self, event: ImageEvent) -> None:
        check_error(event.error)
        now = time.perf_counter() - self._started
        if event.type.endswith(".completed"):
            self._sample.images.append(now)
            self._encoded.append(event.b64_json)
        else:
            self._sample.previews.append(now)

    def check(self) -> None:
        """Every picture that was asked for came, decodes, and shows something."""
        if len(self._encoded) != self._wanted:
            self._sample.error = f"{len(self._encoded)} images instead of {self._wanted}"
            return
        for encoded in self._encoded:
            try:
                flaw = flaw_of(decode_image(base64.b64decode(encoded), MAX_PIXELS))
            except (OmniError, ValueError):
                flaw = "not readable"
            self._sample.error = self._sample.error or (f"image: {flaw}" if flaw else "")


class VideoAsk:
    """A job of POST /v1/videos, followed to its file."""

    def __init__(self, sample: Sample, started: float, wanted_frames: int | None) -> None:
        self._sample, self._started, self._wanted = sample, started, wanted_frames
        self._job = Job(id="", status="")
        self._file = b""

    async def run(self, client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
        """Raises httpx.HTTPError or BadAnswer."""
        job = read_answer((await client.post(url, json=body)).raise_for_status().content, Job)
        seen = job.progress
        while job.status in ("queued", "in_progress"):
            await asyncio.sleep(POLL_S)
            job = read_answer((await client.get(f"{url}/{job.id}")).raise_for_status().content, Job)
            if job.progress != seen:
                seen = job.progress
                self._sample.steps.append(time.perf_counter() - self._started)
        if job.status == "completed":
            self._file = (await client.get(f"{url}/{job.id}/content")).raise_for_status().content
            self._sample.stages = stages_of(job.metrics)
        self._job = job

    def check(self) -> None:
        """The job succeeded; its file decodes, shows something, and is as long as asked for and as the job says."""
        if self._job.status != "completed":
            self._sample.error = f"job {self._job.status}"
            return
        try:
            video = decode_video(self._file, MAX_FRAMES, MAX_PIXELS)
        except OmniError:
            self._sample.error = "video: not readable"
            return
        count = len(video.frames)
        self._sample.video_s = count / video.fps
        flaw = flaw_of(video.frames)
        if self._wanted is not None and count != self._wanted:
            flaw = f"{count} frames instead of {self._wanted}"
        elif abs(float(self._job.seconds or self._sample.video_s) - self._sample.video_s) > 1 / video.fps:
            flaw = f"{self._sample.video_s:.2f} s instead of {self._job.seconds}"
        self._sample.error = f"video: {flaw}" if flaw else ""
