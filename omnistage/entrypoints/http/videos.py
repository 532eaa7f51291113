"""/v1/videos: jobs with progress; /v1/videos/sync: the file at once; /v1/actions: actions as numbers."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any

from omnistage.entrypoints.http.asgi import JSON, Exchange
from omnistage.entrypoints.http.diffusion_inputs import Ask, ask_of, picture
from omnistage.entrypoints.http.events import Media, request_events
from omnistage.entrypoints.http.inputs import load_media
from omnistage.entrypoints.http.media_schema import ActionAnswer, ActionRequest, Video, VideoDeleted, VideoRequest
from omnistage.entrypoints.http.multipart import read_form
from omnistage.entrypoints.http.parse import convert_fields, decode_json, read_query
from omnistage.entrypoints.http.ranges import content_range, wanted_range
from omnistage.entrypoints.http.sse import json_bytes
from omnistage.entrypoints.http.state import ServerState, new_id
from omnistage.entrypoints.http.video_jobs import encode_result
from omnistage.entrypoints.omni import OmniResult, ResultBuilder
from omnistage.errors import ErrorCode, OmniError, RequestError
from omnistage.media.video_encode import MEDIA_TYPE
from omnistage.request import RequestMetrics

MAX_PAGE = 100
DEFAULT_PAGE = 20


async def create_video(state: ServerState, exchange: Exchange) -> None:
    """Starts a video job."""
    body, ask, media = await _read(state, exchange, stream=True)
    video = Video(
        id=ask.request.id,
        model=state.model,
        status="queued",
        progress=0,
        created_at=int(time.time()),
        prompt=body.prompt,
        seconds=f"{body.seconds:g}" if body.seconds is not None else "",
        size=body.size or "",
    )
    job = state.videos.submit(video, ask.request, media, state.trace_headers)
    await exchange.answer(200, JSON, json_bytes(job))


async def video_sync(state: ServerState, exchange: Exchange) -> None:
    """Makes a video and answers with the file."""
    _, ask, media = await _read(state, exchange, stream=False)
    result = await _result(state, ask, media)
    data = await state.run(encode_result, result)
    headers = (
        (b"x-omnistage-seed", str(result.seed).encode()),
        (b"x-omnistage-metrics", json_bytes(result.metrics or RequestMetrics())),
    )
    await exchange.answer(200, MEDIA_TYPE.encode(), data, headers)


async def _read(state: ServerState, exchange: Exchange, *, stream: bool) -> tuple[VideoRequest, Ask, Media]:
    """The request as JSON or as a form with a picture, which stands for the first frame."""
    first: bytes | None = None
    if exchange.header(b"content-type").startswith(b"multipart/form-data"):
        form = read_form(exchange)
        body = convert_fields(dict(form.fields), VideoRequest)
        first = form.files.get("input_reference")
        unknown = sorted(form.uploads.keys() - {"input_reference"})
        if unknown:
            raise RequestError(f"{unknown[0]}: unknown file field", param=unknown[0])
    else:
        body = decode_json(exchange, VideoRequest)
    ask = ask_of(state, body, new_id("video_"), "video", stream=stream)
    exchange.body = b""
    media = await load_media(state, ask.items)
    if first is not None:
        if body.image is not None:
            raise RequestError("input_reference: image is given too", param="input_reference")
        media["first"] = await picture(state, first, "input_reference")
        ask.request.params["image"] = {"media": "first"}
    return body, ask, media


async def _result(state: ServerState, ask: Ask, media: Media) -> OmniResult:
    builder = ResultBuilder(ask.request.id)
    async with aclosing(request_events(state.engine, ask.request, media)) as events:
        async for output in events:
            builder.add(output)
    return builder.result()


async def list_videos(state: ServerState, exchange: Exchange) -> None:
    """Lists video jobs."""
    query = read_query(exchange, {"limit", "after", "order"})
    limit = query.get("limit", str(DEFAULT_PAGE))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:4]) <= MAX_PAGE:
        raise RequestError(f"limit: a number from 1 to {MAX_PAGE}", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order: asc or desc", param="order")
    page = state.videos.list(int(limit), query.get("after"), order == "desc")
    await exchange.answer(200, JSON, json_bytes(page))


async def get_video(state: ServerState, exchange: Exchange) -> None:
    """Gives a video job, or its file below /content."""
    job_id, slash, rest = exchange.path_tail.partition("/")
    job = state.videos.find(job_id)
    if not slash:
        await exchange.answer(200, JSON, json_bytes(job.video))
        return
    if rest != "content":
        raise RequestError("there is no such route", code=ErrorCode.NOT_FOUND)
    if job.file is None:
        raise RequestError(f"the video is {job.video.status}", code=ErrorCode.NOT_FOUND, param="video_id")
    data = await state.run(job.file.read_bytes)
    wanted = wanted_range(exchange.header(b"range"), len(data))
    ranges = (b"accept-ranges", b"bytes")
    if wanted is None:
        await exchange.answer(200, MEDIA_TYPE.encode(), data, (ranges,))
        return
    headers = (ranges, (b"content-range", content_range(wanted, len(data))))
    await exchange.answer(206, MEDIA_TYPE.encode(), data[slice(*wanted)], headers)


async def delete_video(state: ServerState, exchange: Exchange) -> None:
    """Deletes a video job, stopping it if it runs."""
    await state.videos.delete(exchange.path_tail)
    await exchange.answer(200, JSON, json_bytes(VideoDeleted(id=exchange.path_tail)))


async def actions(state: ServerState, exchange: Exchange) -> None:
    """Answers with the actions that a policy or an inverse model gives."""
    body = decode_json(exchange, ActionRequest)
    ask = ask_of(state, body, new_id("act-"), "action", ("action",))
    exchange.body = b""
    result = await _result(state, ask, await load_media(state, ask.items))
    if "action" not in result.tensors:
        raise OmniError("the model gave no actions", code=ErrorCode.INTERNAL)
    action = result.tensors["action"]
    answer = ActionAnswer(
        data=action.tolist(),
        shape=(int(action.shape[0]), int(action.shape[1])),
        domain=_text(body.action.get("domain_name", result.meta.get("domain"))),
        fps=body.fps if body.fps is not None else result.meta.get("fps"),
        seed=result.seed,
        timing=result.metrics or RequestMetrics(),
    )
    await exchange.answer(200, JSON, json_bytes(answer))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
