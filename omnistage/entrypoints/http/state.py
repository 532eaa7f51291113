"""What all requests of one server share: engine, limits, pools, stores, and what the pipeline can do."""

from __future__ import annotations

import copy
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import msgspec

from omnistage.config.model import CLIENT, PipelineConfig, StageSpec
from omnistage.engine.client import EngineClient, EngineControl
from omnistage.engine.timeline import Front
from omnistage.entrypoints.http.asgi import BodyBudget, DateHeader
from omnistage.entrypoints.http.engine_view import EngineView
from omnistage.entrypoints.http.metrics import HttpMetrics
from omnistage.entrypoints.http.transcripts import TranscriptStore
from omnistage.entrypoints.http.video_jobs import VideoJobs
from omnistage.errors import ErrorCode, RequestError
from omnistage.media.audio_encode import PCM_RATE
from omnistage.media.isolate import ChildDecoder
from omnistage.media.jobs import DecodeJob, decode
from omnistage.media.pool import MediaPool
from omnistage.media.source import MediaSource
from omnistage.payload import MultimodalPayload

T = TypeVar("T")


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the HTTP front. `body_idle_timeout_s`: seconds without a byte of an expected body; `isolate`: media are
    decoded in processes of their own, as the configuration's `media` says."""

    media_threads: int = 2
    body_idle_timeout_s: float = 30.0
    bodies_in_flight: int = 8
    isolate: bool = False


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the pipeline's graph offers. Output modalities are the client's port names.

    `text_stages` are the AR stages whose text goes to the client; `features` are what the stages declare.
    """

    tasks: tuple[str, ...]
    output_modalities: tuple[str, ...]
    text_stages: frozenset[str]
    features: frozenset[str]


class ServerState:
    """Shared by all requests of one app; used from the event loop only."""

    def __init__(self, engine: EngineClient, options: HttpOptions) -> None:
        self.engine, self.limits, self.options = engine, engine.config.limits, options
        self.control: EngineControl | None = None
        self.owner = ""
        self.trace_headers: Mapping[str, str] = {}
        self._front: Front | None = None
        self.pool: MediaPool = MediaPool(options.media_threads)
        media = engine.config.media
        self.source = MediaSource(media)
        isolated = options.isolate and media.decode_processes > 0
        self.decoder = ChildDecoder(media) if isolated else None
        self.max_body = self.limits.max_body_mb << 20
        self.budget = BodyBudget(self.max_body * options.bodies_in_flight)
        self.transcripts = TranscriptStore()
        self.videos = VideoJobs(engine, self.pool)
        self.metrics = HttpMetrics()
        self.date = DateHeader()
        self.pages: dict[str, bytes] = {}
        self.created = int(time.time())
        self.model = engine.config.served_name or engine.config.model
        self.capabilities = capabilities_of(engine.pipeline, engine.config.variant)
        self.sample_rate = engine.pipeline.sample_rate or PCM_RATE
        self.version = importlib.metadata.version("omnistage")
        self.fingerprint = f"omnistage-{self.version}"

    def owned_by(self, owner: str) -> ServerState:
        """The same server for one API key: spoken answers, video jobs and prefix caches of its own."""
        state = copy.copy(self)
        state.owner = owner
        state.engine = EngineView(self.engine, owner=owner)
        state.transcripts = TranscriptStore()
        state.videos = VideoJobs(state.engine, self.pool)
        return state

    def traced(self, front: Front) -> ServerState:
        """The same server for one exchange, which takes down what its requests and media take."""
        state = copy.copy(self)
        state.engine, state._front = EngineView(self.engine, front=front), front
        state.trace_headers = front.trace_headers
        return state

    def within(self, headers: Mapping[str, str]) -> ServerState:
        """The same server for a client with that trace context."""
        state = copy.copy(self)
        state.trace_headers = headers
        return state

    @contextmanager
    def exchange(self, exchange_id: str) -> Iterator[EngineClient]:
        """The engine for requests of an exchange of its own, on whose timeline they go."""
        front = self.engine.timelines.open(exchange_id, self.trace_headers)
        try:
            yield EngineView(self.engine, front=front)
        finally:
            self.engine.timelines.close(front)

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Media work, in a thread: `function(*args)`; what it raises is raised here."""
        with self._timed():
            return await self.pool.run(function, *args)

    async def decode(self, job: DecodeJob, data: bytes) -> MultimodalPayload:
        """See `omnistage.media.jobs.decode`."""
        with self._timed():
            if self.decoder is not None:
                return await self.decoder.decode(job, data)
            return await self.pool.run(decode, job, data)

    def _timed(self) -> AbstractContextManager[None]:
        return nullcontext() if self._front is None else self._front.media()

    def check_model(self, model: str | None) -> None:
        """Raises RequestError(UNKNOWN_MODEL) unless it is the served name; None means that one."""
        if model is not None and model != self.model:
            message = f"model: {model!r} is not served here; use {self.model!r}"
            raise RequestError(message, code=ErrorCode.UNKNOWN_MODEL, param="model")

    def check_task(self, task: str) -> None:
        """Raises RequestError when the pipeline has no such entry."""
        if task not in self.capabilities.tasks:
            known = ", ".join(self.capabilities.tasks)
            raise RequestError(f"model: {self.model!r} does not serve {task} (it serves {known})", param="model")

    def check_stage_names(self, names: list[str]) -> None:
        """Raises RequestError naming the first `sampling` key that is no stage."""
        for name in names:
            if name not in self.engine.config.stages:
                known = ", ".join(self.engine.config.stages)
                raise RequestError(f"sampling.{name}: no such stage (stages: {known})", param=f"sampling.{name}")


def capabilities_of(pipeline: PipelineConfig, variant: str) -> Capabilities:
    """Reads a pipeline's graph."""
    graph = pipeline.variants[variant]
    stages: dict[str, StageSpec] = {spec.name: spec for spec in graph.stages}
    modalities, text_stages = list[str](), set[str]()
    for edge in graph.edges:
        if edge.target_stage != CLIENT:
            continue
        if edge.target_port not in modalities:
            modalities.append(edge.target_port)
        if edge.target_port == "text" and stages[edge.source_stage].kind == "ar":
            text_stages.add(edge.source_stage)
    features = frozenset[str]().union(*(spec.capabilities for spec in graph.stages))
    return Capabilities(
        tasks=pipeline.tasks,
        output_modalities=tuple(modalities),
        text_stages=frozenset(text_stages),
        features=features,
    )


def new_id(prefix: str) -> str:
    """An id of 96 random bits."""
    return prefix + os.urandom(12).hex()
