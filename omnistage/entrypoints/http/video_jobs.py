"""Video jobs: created at once, made in the background, kept until they expire, stopped when deleted."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from omnistage.engine.client import EngineClient
from omnistage.entrypoints.http.engine_view import EngineView
from omnistage.entrypoints.http.errors import internal_error
from omnistage.entrypoints.http.events import Media, request_events
from omnistage.entrypoints.http.media_schema import Video, VideoError, VideoList
from omnistage.entrypoints.omni import OmniResult, ResultBuilder
from omnistage.errors import ErrorCode, ErrorInfo, OmniError, RequestError
from omnistage.media.pool import MediaPool
from omnistage.media.video_encode import encode_video
from omnistage.request import OmniRequest

logger = logging.getLogger(__name__)
MAX_JOBS = 256
KEEP_S = 3600
DONE_PERCENT = 100


class Job(msgspec.Struct):
    """A job's public face, its task while it runs, its file when it is done."""

    video: Video
    task: asyncio.Task[None] | None = None
    file: Path | None = None


class VideoJobs:
    """Owns jobs and their files. Files lie in a private folder, made for the first, under names of the server's own."""

    def __init__(self, engine: EngineClient, pool: MediaPool) -> None:
        self._engine = engine
        self._pool = pool
        self._jobs: dict[str, Job] = {}
        self._folder: Path | None = None

    def submit(
        self, video: Video, request: OmniRequest, media: Media, trace_headers: Mapping[str, str] | None = None
    ) -> Video:
        """Starts a job, in the client's trace context. Raises RequestError(OVERLOADED) when too many are kept."""
        self._expire()
        if len(self._jobs) >= MAX_JOBS:
            raise RequestError("too many video jobs are kept; delete some", code=ErrorCode.OVERLOADED, retry_after_s=60)
        job = self._jobs[video.id] = Job(video)
        job.task = asyncio.create_task(self._run(job, request, media, trace_headers or {}))
        return video

    def find(self, job_id: str) -> Job:
        """Raises RequestError(NOT_FOUND)."""
        self._expire()
        job = self._jobs.get(job_id)
        if job is None:
            raise RequestError("no video job of this id", code=ErrorCode.NOT_FOUND, param="video_id")
        return job

    def list(self, limit: int, after: str | None, newest_first: bool) -> VideoList:
        """A page of jobs by time of creation."""
        self._expire()
        jobs = [job.video for job in self._jobs.values()]
        if newest_first:
            jobs.reverse()
        ids = [video.id for video in jobs]
        if after is not None:
            if after not in ids:
                raise RequestError("after: no video job of this id", param="after")
            jobs = jobs[ids.index(after) + 1 :]
        page = jobs[:limit]
        ends = (page[0].id, page[-1].id) if page else (None, None)
        return VideoList(data=page, first_id=ends[0], last_id=ends[1], has_more=len(jobs) > limit)

    async def delete(self, job_id: str) -> None:
        """Stops the job's work and removes its file."""
        job = self.find(job_id)
        del self._jobs[job_id]
        await _ended(job)
        self._drop_file(job)

    async def close(self) -> None:
        for job in self._jobs.values():
            await _ended(job)
        self._jobs.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _expire(self) -> None:
        now = time.time()
        for job_id, job in list(self._jobs.items()):
            if job.video.expires_at is not None and job.video.expires_at < now:
                self._drop_file(self._jobs.pop(job_id))

    def _drop_file(self, job: Job) -> None:
        if job.file is not None:
            job.file.unlink(missing_ok=True)
            job.file = None

    # -- the work

    async def _run(self, job: Job, request: OmniRequest, media: Media, trace_headers: Mapping[str, str]) -> None:
        front = self._engine.timelines.open(job.video.id, trace_headers)
        try:
            result = await self._collect(EngineView(self._engine, front=front), job, request, media)
            with front.media():
                await self._store(job, result)
        except OmniError as error:
            fail(job.video, error.info)
        except Exception:
            logger.exception("%s failed", job.video.id)
            fail(job.video, internal_error())
        finally:
            self._engine.timelines.close(front)
        job.video.completed_at = int(time.time())
        job.video.expires_at = job.video.completed_at + KEEP_S
        job.task = None

    async def _collect(self, engine: EngineClient, job: Job, request: OmniRequest, media: Media) -> OmniResult:
        builder = ResultBuilder(request.id)
        async with aclosing(request_events(engine, request, media)) as events:
            async for output in events:
                if output.modality == "progress" and output.payload is not None:
                    note_progress(job.video, output.payload.meta)
                else:
                    job.video.status = "in_progress"
                    builder.add(output)
        return builder.result()

    async def _store(self, job: Job, result: OmniResult) -> None:
        data = await self._pool.run(encode_result, result)
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="omnistage-videos-"))
        job.file = self._folder / f"{job.video.id}.mp4"
        await self._pool.run(job.file.write_bytes, data)
        finish(job.video, result)


def note_progress(video: Video, meta: dict[str, Any]) -> None:
    """A started job is never at 100 before its file exists."""
    video.status = "in_progress"
    steps = int(meta.get("steps", 0))
    if steps:
        video.progress = min(DONE_PERCENT - 1, DONE_PERCENT * int(meta.get("step", 0)) // steps)


def encode_result(result: OmniResult) -> bytes:
    """The mp4 of an answer. Raises OmniError when it has no frames."""
    if "video" not in result.tensors:
        raise OmniError("the model gave no video", code=ErrorCode.INTERNAL)
    rate = int(result.meta.get("sample_rate", 0))
    return encode_video(result.tensors["video"], float(result.meta["fps"]), result.tensors.get("audio"), rate)


def finish(video: Video, result: OmniResult) -> None:
    """Fills in what is known once the frames exist."""
    frames = result.tensors["video"]
    video.status, video.progress = "completed", DONE_PERCENT
    video.seconds = f"{len(frames) / float(result.meta['fps']):g}"
    video.size = f"{frames.shape[2]}x{frames.shape[1]}"
    video.seed = result.seed
    if "action" in result.tensors:
        video.action = result.tensors["action"].tolist()
    if result.metrics is not None:
        video.metrics = result.metrics


def fail(video: Video, info: ErrorInfo) -> None:
    video.status = "failed"
    video.error = VideoError(code=info.code.value, message=info.message)


async def _ended(job: Job) -> None:
    if job.task is not None:
        job.task.cancel()
        await asyncio.gather(job.task, return_exceptions=True)
