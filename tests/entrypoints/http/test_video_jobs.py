"""Video jobs over a scripted engine: how they end when the work does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from omnistage.entrypoints.http.media_schema import Video
from omnistage.entrypoints.http.ranges import wanted_range
from omnistage.entrypoints.http.video_jobs import VideoJobs
from omnistage.media.pool import MediaPool
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, OmniRequestOutput
from tests.entrypoints.http.conftest import Start
from tests.entrypoints.http.fake_engine import PIPELINE, FakeEngine, Media, last_event


async def without_rate(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
    """Frames that cannot be encoded: a defect of the model."""
    payload = MultimodalPayload.of(video=np.zeros((2, 32, 48, 3), np.uint8))
    yield OmniRequestOutput(request_id=request.id, stage="dit", modality="video", payload=payload)
    yield last_event(request)


async def test_job_that_a_defect_ends_has_failed_and_does_not_run_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    pool = MediaPool(1)
    jobs = VideoJobs(FakeEngine(without_rate), pool)
    video = Video(id="video_1", model="m", status="queued", progress=0, created_at=0, seconds="1", size="48x32")
    jobs.submit(video, OmniRequest(id="video_1", task="video"), {})
    task = jobs.find("video_1").task
    assert task is not None
    await asyncio.wait_for(task, 10)
    assert (video.status, video.error and video.error.code) == ("failed", "internal_error")
    assert video.expires_at is not None
    assert "KeyError: 'fps'" in caplog.text
    await jobs.close()
    pool.close()


async def test_job_is_of_the_trace_of_the_client_that_asked_for_it() -> None:
    pool = MediaPool(1)
    engine = FakeEngine(without_rate)
    jobs = VideoJobs(engine, pool)
    video = Video(id="video_1", model="m", status="queued", progress=0, created_at=0, seconds="1", size="48x32")
    jobs.submit(video, OmniRequest(id="video_1", task="video"), {}, {"traceparent": "00-1"})
    while not engine.requests:
        await asyncio.sleep(0)
    assert engine.timelines._claims["video_1"].trace_headers == {"traceparent": "00-1"}
    await jobs.close()
    pool.close()


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"bytes=0-", (0, 100)),
        (b"bytes=0-1", (0, 2)),
        (b"bytes=90-500", (90, 100)),
        (b"bytes=-10", (90, 100)),
        (b"bytes=-500", (0, 100)),
        (b"", None),
        (b"bytes=-", None),
        (b"bytes=-0", None),
        (b"bytes=100-", None),
        (b"bytes=5-4", None),
        (b"bytes=0-1,5-6", None),
        (b"lines=0-1", None),
    ],
)
def test_range_is_that_of_the_header_or_the_whole_file(header: bytes, expected: tuple[int, int] | None) -> None:
    assert wanted_range(header, 100) == expected


async def filmed(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
    payload = MultimodalPayload.of({"fps": 4}, video=np.zeros((4, 32, 48, 3), np.uint8))
    yield OmniRequestOutput(request_id=request.id, stage="dit", modality="video", payload=payload)
    yield last_event(request)


async def test_browser_that_seeks_in_a_video_gets_the_part_that_it_asks_for(start: Start) -> None:
    engine = FakeEngine(filmed)
    engine.pipeline = msgspec.structs.replace(PIPELINE, tasks=("video",))
    http = (await start(engine)).http
    path = f"/v1/videos/{(await http.post('/v1/videos', json={'prompt': 'x'})).json()['id']}"
    async with asyncio.timeout(20):
        while (await http.get(path)).json()["status"] != "completed":
            await asyncio.sleep(0.01)
    whole = await http.get(f"{path}/content")
    part = await http.get(f"{path}/content", headers={"range": "bytes=4-7"})
    assert (whole.status_code, whole.headers["accept-ranges"]) == (200, "bytes")
    assert (part.status_code, part.content) == (206, whole.content[4:8] or b"none")
    assert part.headers["content-range"] == f"bytes 4-7/{len(whole.content)}"
