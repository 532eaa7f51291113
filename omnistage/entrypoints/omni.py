"""Offline Python: `Omni` (blocking) and `AsyncOmni` (async iterator) over one engine in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np

from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.request_line import Line, parse_line
from omnistage.errors import ErrorCode, ErrorInfo, OmniError
from omnistage.payload import Array, MultimodalPayload
from omnistage.request import FinishReason, OmniRequest, OmniRequestOutput, RequestMetrics, is_reasoning
from omnistage.tools import MadeCall, MadeCalls

Ask = str | Mapping[str, Any] | OmniRequest
# Events that say how far an answer is, and are no part of it.
PASSING = ("progress", "partial")
# After which a full engine is asked again when it does not say.
RETRY_S = 0.05
OnOutput = Callable[[OmniRequestOutput], None]


class OmniResult(msgspec.Struct, kw_only=True):
    """A whole answer: the deltas of a request put together.

    `reasoning` is what a thinking model thought before its answer, `tool_calls` the calls that it made.
    `tensors` has one array per media name: "audio" float32 [channels, samples], "image" uint8 [n, H, W, 3], ...
    `meta` merges the metadata of the media ("sample_rate", "fps", ...). `error` is set when the request failed.
    """

    request_id: str
    text: str = ""
    reasoning: str = ""
    tool_calls: list[MadeCall] = []
    token_ids: list[int] = []
    tensors: dict[str, Array] = {}
    meta: dict[str, Any] = {}
    finish_reason: FinishReason | None = None
    seed: int | None = None
    metrics: RequestMetrics | None = None
    error: ErrorInfo | None = None

    def raise_for_error(self) -> OmniResult:
        """Self, or the OmniError that ended the request."""
        if self.error is not None:
            raise OmniError.from_info(self.error)
        return self


class ResultBuilder:
    """Puts the events of one request together. Media chunks are concatenated along their last axis (audio) or first."""

    def __init__(self, request_id: str) -> None:
        self._calls = MadeCalls(request_id)
        self._result = OmniResult(request_id=request_id, token_ids=[], tool_calls=self._calls.calls)
        self._pieces: dict[str, list[Array]] = {}

    def add(self, output: OmniRequestOutput) -> None:
        result = self._result
        if output.finished:
            result.finish_reason, result.seed = output.finish_reason, output.seed
            result.metrics, result.error = output.metrics, output.error
            return
        if output.modality in PASSING:
            return
        if is_reasoning(output):
            result.reasoning += output.text
        else:
            result.text += output.text
        result.token_ids.extend(output.token_ids)
        if output.payload is not None:
            self._add_payload(output.payload)

    def _add_payload(self, payload: MultimodalPayload) -> None:
        for name, tensor in payload.tensors.items():
            self._pieces.setdefault(name, []).append(tensor.array)
        self._calls.take(payload.meta.get("tool_calls", []))
        skipped = ("text", "token_ids", "logprobs", "tool_calls", "reasoning")
        self._result.meta |= {key: value for key, value in payload.meta.items() if key not in skipped}

    def failed(self, error: OmniError) -> OmniResult:
        """The result of a request that was not admitted."""
        self._result.error, self._result.finish_reason = error.info, FinishReason.ERROR
        return self._result

    def result(self) -> OmniResult:
        for name, pieces in self._pieces.items():
            axis = -1 if name in ("audio", "codes", "waveform") else 0
            self._result.tensors[name] = np.concatenate(pieces, axis=axis)
        return self._result


class AsyncOmni:
    """An engine for one model in the running event loop.

    >>> async with AsyncOmni("smol-speech") as omni:
    ...     async for output in omni.generate({"prompt": "Hi!"}): ...
    """

    def __init__(self, model: str, deploy: str | Path | None = None, **overrides: Any) -> None:
        self.config = resolve_config(model, deploy, overrides)
        self.engine = AsyncOmniEngine(self.config)

    async def __aenter__(self) -> AsyncOmni:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.stop()

    def generate(
        self, request: Ask, media: dict[str, MultimodalPayload] | None = None
    ) -> AsyncIterator[OmniRequestOutput]:
        """Events of one request; see `EngineClient.generate`. A string is a prompt, a mapping a request line."""
        line = self.line(request, media)
        return self.engine.generate(line.request, line.media)

    async def result(self, request: Ask, media: dict[str, MultimodalPayload] | None = None) -> OmniResult:
        """The whole answer. An error, of admission too, is in `result.error`."""
        return await self.collect(self.line(request, media))

    async def collect(self, line: Line, on_output: OnOutput | None = None) -> OmniResult:
        """The whole answer to a parsed line; `on_output` sees every event."""
        builder = ResultBuilder(line.request.id)
        try:
            async for output in self.engine.generate(line.request, line.media):
                builder.add(output)
                if on_output is not None:
                    on_output(output)
        except OmniError as error:
            return builder.failed(error)
        return builder.result()

    def line(self, request: Ask, media: dict[str, MultimodalPayload] | None) -> Line:
        if isinstance(request, OmniRequest):
            return Line(request, media or {})
        fields = {"prompt": request} if isinstance(request, str) else dict(request)
        line = parse_line({"id": uuid4().hex} | fields, self.config.limits)
        return Line(line.request, line.media | (media or {}))

    async def abort(self, request_id: str) -> bool:
        return await self.engine.abort(request_id)


class Omni:
    """The same, blocking: an event loop of its own in a background thread. A context manager; `close()` ends it.

    >>> with Omni("smol-speech") as omni:
    ...     print(omni.generate("Hi!")[0].text)
    """

    def __init__(self, model: str, deploy: str | Path | None = None, **overrides: Any) -> None:
        self._omni = AsyncOmni(model, deploy, **overrides)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omnistage-engine", daemon=True)
        self._thread.start()
        try:
            self._call(self._omni.engine.start())
        except BaseException:
            self._end_loop()
            raise

    @property
    def engine(self) -> AsyncOmniEngine:
        return self._omni.engine

    def _call(self, coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()

    def generate(self, requests: Ask | Iterable[Ask], on_output: OnOutput | None = None) -> list[OmniResult]:
        """Answers in the order of the requests, of which as many run together as the engine takes. `on_output` sees
        every event."""
        single = isinstance(requests, (str, Mapping, OmniRequest))
        asks: list[Ask] = [requests] if single else list(requests)  # type: ignore[list-item,arg-type]
        return self.generate_lines([self._omni.line(ask, None) for ask in asks], on_output)

    def generate_lines(self, lines: list[Line], on_output: OnOutput | None = None) -> list[OmniResult]:
        """The same for parsed lines."""
        results: list[OmniResult] = self._call(self._all(lines, on_output))
        return results

    async def _all(self, lines: list[Line], on_output: OnOutput | None) -> list[OmniResult]:
        places = asyncio.Semaphore(self._omni.config.limits.max_running)
        return list(await asyncio.gather(*(self._patiently(line, places, on_output) for line in lines)))

    async def _patiently(self, line: Line, places: asyncio.Semaphore, on_output: OnOutput | None) -> OmniResult:
        """The answer to one of many: nobody else waits, so a full engine is asked again instead of failing the line."""
        async with places:
            while True:
                result = await self._omni.collect(line, on_output)
                if result.error is None or result.error.code != ErrorCode.OVERLOADED:
                    return result
                await asyncio.sleep(result.error.retry_after_s or RETRY_S)

    def abort(self, request_id: str) -> bool:
        ended: bool = self._call(self._omni.abort(request_id))
        return ended

    def close(self) -> None:
        if self._loop.is_running():
            self._call(self._omni.engine.stop())
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Omni:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
