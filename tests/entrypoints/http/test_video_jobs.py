"""Video jobs over a scripted engine: how they end when the work does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from omnistage.entrypoints.http.media_schema import Video
from omnistage.entrypoints.http.video_jobs import VideoJobs
from omnistage.media.pool import MediaPool
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, OmniRequestOutput
from tests.entrypoints.http.fake_engine import FakeEngine, Media, last_event


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
