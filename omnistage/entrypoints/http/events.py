"""Events of engine requests, with ownership: payloads are released, unfinished requests aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from omnistage.engine.client import EngineClient
from omnistage.errors import ErrorCode, OmniError
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason, OmniRequest, OmniRequestOutput

Media = dict[str, MultimodalPayload]
ChoiceEvents = AsyncGenerator[tuple[int, OmniRequestOutput], None]


async def request_events(
    engine: EngineClient, request: OmniRequest, media: Media
) -> AsyncGenerator[OmniRequestOutput, None]:
    """Events of one request; close it to abort. An event's payload is valid until the next event is asked for.

    Raises OmniError when the request is refused, fails or is aborted by somebody else.
    """
    finished = False
    stream = engine.generate(request, media)
    try:
        async for event in stream:
            finished = event.finished
            with _released(event):
                _raise_if_failed(event)
                yield event
        if not finished:
            raise OmniError("the engine ended the request without a result", code=ErrorCode.INTERNAL)
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
        if not finished:
            await engine.abort(request.id)


@contextmanager
def _released(event: OmniRequestOutput) -> Iterator[None]:
    """Releases the event's payload when the block ends."""
    try:
        yield
    finally:
        if event.payload is not None:
            event.payload.release()


async def choice_events(engine: EngineClient, requests: list[OmniRequest], media: Media) -> ChoiceEvents:
    """Events of several requests as they come, each with the index of its request; bounded: one event per request."""
    if len(requests) == 1:
        single = request_events(engine, requests[0], media)
        try:
            async for event in single:
                yield 0, event
        finally:
            await single.aclose()
        return
    streams = [request_events(engine, request, _copies(media)) for request in requests]
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            task = next(task for task in waiting if task in done)  # longest waiting first
            index, event = waiting.pop(task), task.result()
            yield index, event
            if not event.finished:
                waiting[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _copies(media: Media) -> Media:
    """Payloads that share their arrays: each request owns, and releases, its own."""
    return {key: MultimodalPayload(payload.tensors, payload.meta) for key, payload in media.items()}


def _raise_if_failed(event: OmniRequestOutput) -> None:
    if event.error is not None:
        raise OmniError.from_info(event.error)
    if event.finish_reason is FinishReason.ABORT:
        raise OmniError("the request was aborted", code=ErrorCode.ABORTED)
    if event.finish_reason is FinishReason.ERROR:
        raise OmniError("the request failed", code=ErrorCode.INTERNAL)
