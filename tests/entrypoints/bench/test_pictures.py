"""Load on image and video routes: timings of a scripted server, what is received looked at, real pictures offline."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from omnistage.entrypoints.bench.offline import OfflineTarget
from omnistage.entrypoints.bench.pictures import POLL_S
from omnistage.entrypoints.bench.report import summarise, table
from omnistage.entrypoints.bench.sample import Sample
from omnistage.entrypoints.bench.target import Target, Task
from omnistage.entrypoints.cli.bench import measure_offline
from omnistage.entrypoints.cli.main import build_parser
from omnistage.media.image_encode import encode_image
from omnistage.media.video_encode import encode_video
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, OmniRequestOutput
from tests.entrypoints.http.fake_engine import FakeEngine, Media, last_event

SLACK_S = 0.06
RAMP = np.indices((32, 48)).sum(0)[..., None].astype(np.uint8) * np.array([1, 2, 3], np.uint8)
FLAT = np.full((32, 48, 3), 7, np.uint8)


def png(pixels: np.ndarray) -> str:
    return base64.b64encode(encode_image(pixels, "png")).decode()


def film(pixels: np.ndarray, frames: int) -> bytes:
    return encode_video(np.stack([pixels] * frames), 8.0)


class Scripted(httpx.AsyncBaseTransport):
    """A server whose picture takes 100 ms after a preview at 50 ms, and whose video job takes three steps of 60 ms."""

    def __init__(self, image: str = "", video: bytes = b"", status: str = "completed", seconds: str = "1") -> None:
        self._image, self._video, self._status, self._seconds = image, video, status, seconds
        self._began = 0.0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/images/generations":
            return await self._pictures(json.loads(await request.aread()))
        if request.method == "POST":
            self._began = time.perf_counter()
        if request.url.path.endswith("/content"):
            return httpx.Response(200, content=self._video)
        return httpx.Response(200, json=self._job())

    def _job(self) -> dict[str, Any]:
        steps = int((time.perf_counter() - self._began) / 0.06)
        status = self._status if steps >= 3 else "in_progress"
        metrics = {"stages": {"dit": {"compute_s": 0.18, "steps": 3}}}
        job = {"id": "v", "status": status, "progress": min(33 * steps, 99), "seconds": self._seconds}
        return job | {"metrics": metrics}

    async def _pictures(self, body: dict[str, Any]) -> httpx.Response:
        if body.get("stream"):
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=self._events())
        await asyncio.sleep(0.1)
        answer = {"data": [{"b64_json": self._image}] * body.get("n", 1), "metrics": {"stages": {"dit": {"steps": 4}}}}
        return httpx.Response(200, json=answer)

    async def _events(self) -> AsyncIterator[bytes]:
        for kind in ("partial_image", "completed"):
            await asyncio.sleep(0.05)
            event = {"type": f"image_generation.{kind}", "b64_json": self._image}
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


async def asked(server: Scripted, task: Task, **extra: Any) -> Sample:
    async with httpx.AsyncClient(transport=server) as client:
        return await Target(client, "http://server", "m", task, extra).ask("a cup")


async def test_picture_takes_as_long_as_the_server_took() -> None:
    sample = await asked(Scripted(png(RAMP)), "image", n=2)
    assert (sample.error, len(sample.images), sample.stages["dit"].steps) == ("", 2, 4)
    assert abs(sample.end - 0.1) < SLACK_S
    assert sample.figures()["ttfp"] == [sample.images[0]]


async def test_preview_counts_as_first_picture_and_not_as_a_picture() -> None:
    sample = await asked(Scripted(png(RAMP)), "image", stream=True, partial_images=1)
    assert (sample.error, len(sample.images), len(sample.previews)) == ("", 1, 1)
    assert abs(sample.figures()["ttfp"][0] - 0.05) < SLACK_S
    assert abs(sample.images[0] - 0.1) < SLACK_S


async def test_video_job_is_followed_step_by_step_to_a_file_of_the_right_length() -> None:
    sample = await asked(Scripted(video=film(RAMP, 8)), "video", num_frames=8)
    assert (sample.error, sample.video_s, sample.stages["dit"].compute_s) == ("", 1.0, 0.18)
    figures = sample.figures()
    assert abs(sample.end - 0.18) < SLACK_S + POLL_S
    assert figures["rtf"] == [sample.end]
    assert len(figures["step"]) == 2
    assert abs(np.mean(figures["step"]) - 0.06) < SLACK_S
    result = summarise([sample, sample], 4.0, [50.0], {"rtf": 30.0, "step": 1.0})
    assert (result.video_s_per_s, result.images_per_s, result.goodput) == (0.5, 0.0, 0.5)
    assert "0.50 s of video per s" in table(result)
    assert summarise([sample], 4.0, [50.0], {"rtf": 0.01}).goodput == 0


@pytest.mark.parametrize(
    ("server", "task", "extra", "error"),
    [
        (Scripted(png(FLAT)), "image", {}, "image: one flat colour"),
        (Scripted("AAAA"), "image", {}, "image: not readable"),
        (Scripted(png(RAMP)), "image", {"stream": True, "n": 2}, "1 images instead of 2"),
        (Scripted(video=film(FLAT, 8)), "video", {}, "video: one flat colour"),
        (Scripted(video=b"no film"), "video", {}, "video: not readable"),
        (Scripted(video=film(RAMP, 8)), "video", {"num_frames": 9}, "video: 8 frames instead of 9"),
        (Scripted(video=film(RAMP, 8), seconds="3"), "video", {}, "video: 1.00 s instead of 3"),
        (Scripted(status="failed"), "video", {}, "job failed"),
    ],
)
async def test_what_is_not_what_was_asked_for_is_a_failure_by_name(
    server: Scripted, task: Task, extra: dict[str, Any], error: str
) -> None:
    assert (await asked(server, task, **extra)).error == error


async def test_offline_load_on_toydit_gives_its_pictures_steps_and_stages() -> None:
    extra = '{"params": {"num_inference_steps": 5}}'
    words = ["bench", "offline", "toydit", "--task", "image", "--requests", "3", "--extra-body", extra]
    words += ["--set", "placement=inline", "--set", "stages.dit.step_delay_s=0.01"]
    result = await measure_offline(build_parser().parse_args(words))
    assert result.errors == {}
    assert result.images_per_s * result.duration_s == pytest.approx(3)
    assert result.metrics["step"].count >= 3
    assert result.stages["dit"].requests == 3


async def test_flat_video_is_no_answer_offline_either() -> None:
    def engine(pixels: np.ndarray) -> FakeEngine:
        async def script(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
            payload = MultimodalPayload.of({"fps": 8.0}, video=np.stack([pixels] * 4))
            yield OmniRequestOutput(request_id=request.id, stage="dit", modality="video", payload=payload)
            yield last_event(request)

        return FakeEngine(script)

    good = await OfflineTarget(engine(RAMP), "video", {}).ask("rain")
    assert (good.error, good.video_s) == ("", 0.5)
    assert (await OfflineTarget(engine(FLAT), "video", {}).ask("rain")).error == "video: one flat colour"
