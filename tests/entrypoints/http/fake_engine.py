"""A scripted EngineClient: no stages, no waiting, every step visible."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np

from omnistage.config.model import (
    EdgeSpec,
    LimitsConfig,
    OmniConfig,
    PipelineConfig,
    RequestPlan,
    StageConfig,
    StageSpec,
    TraceConfig,
    Variant,
)
from omnistage.engine.client import Health, ReplicaHealth
from omnistage.engine.timeline import Timelines
from omnistage.payload import MultimodalPayload
from omnistage.request import FinishReason, OmniRequest, OmniRequestOutput, RequestMetrics, StageMetrics

RATE = 24_000
Media = dict[str, MultimodalPayload]
Script = Callable[[OmniRequest, Media], AsyncIterator[OmniRequestOutput]]

PIPELINE = PipelineConfig(
    name="fake",
    tasks=("chat", "completion", "speech", "transcription"),
    voices=("heart", "joe"),
    sample_rate=RATE,
    plan=lambda request, media, config: RequestPlan(stages=()),
    variants={
        "default": Variant(
            stages=(
                StageSpec(name="listener", kind="generation", component="", outputs={"transcript": "text"}),
                StageSpec(name="thinker", kind="ar", component="", outputs={"text": "text"}),
                StageSpec(name="code2wav", kind="generation", component="", outputs={"audio": "audio"}),
            ),
            edges=(
                EdgeSpec("thinker.text", "client.text"),
                EdgeSpec("thinker.text", "code2wav.text"),
                EdgeSpec("code2wav.audio", "client.audio"),
                EdgeSpec("listener.transcript", "client.text"),
            ),
        )
    },
)


def fake_config(**limits: int) -> OmniConfig:
    kinds = {spec.name: spec.kind for spec in PIPELINE.variants["default"].stages}
    return OmniConfig(
        model="fake-model",
        model_path="",
        pipeline="fake",
        variant="default",
        stages={name: StageConfig(name=name, kind=kind) for name, kind in kinds.items()},
        edges={},
        limits=LimitsConfig(**limits),
    )


def text_event(request: OmniRequest, text: str, seq: int = 0, meta: dict | None = None) -> OmniRequestOutput:
    payload = MultimodalPayload(meta=meta) if meta is not None else None
    return OmniRequestOutput(
        request_id=request.id, stage="thinker", modality="text", seq=seq, text=text, token_ids=(seq,), payload=payload
    )


def audio_event(request: OmniRequest, samples: np.ndarray, seq: int = 0, rate: int = RATE) -> OmniRequestOutput:
    payload = MultimodalPayload.of({"sample_rate": rate}, audio=samples.astype(np.float32))
    return OmniRequestOutput(
        request_id=request.id, stage="code2wav", modality="audio", seq=seq, payload=payload, final=False
    )


def last_event(
    request: OmniRequest, reason: FinishReason = FinishReason.STOP, tokens: int = 0, seed: int | None = None
) -> OmniRequestOutput:
    thinker = StageMetrics(input_tokens=7, output_tokens=tokens, cached_tokens=2)
    metrics = RequestMetrics(e2el_s=0.5, stages={"thinker": thinker, "code2wav": StageMetrics(output_tokens=100)})
    used = seed if seed is not None else request.seed
    return OmniRequestOutput(
        request_id=request.id, finished=True, finish_reason=reason, seed=99 if used is None else used, metrics=metrics
    )


def speech_of(words: int) -> np.ndarray:
    """0.25 s of a tone per word, float32 [1, samples]."""
    time_axis = np.arange(words * RATE // 4) / RATE
    return (0.5 * np.sin(2 * np.pi * 440 * time_axis)).astype(np.float32)[None]


async def helpful(request: OmniRequest, media: Media) -> AsyncIterator[OmniRequestOutput]:
    """Answers every task: three words, a tone of 0.25 s per word when audio is wanted."""
    words = ["Hello", " big", " world"]
    if request.task == "transcription":
        seconds = media["audio"]["audio"].shape[1] / media["audio"].meta["sample_rate"]
        segments = [{"start": 0.0, "end": seconds / 2, "text": "Hello big"}, {"start": seconds / 2, "end": seconds}]
        segments[1]["text"] = " world"
        yield text_event(request, "Hello big", 0, {"texts": ["Hello big"], "segments": segments[:1]})
        yield text_event(request, " world", 1, {"texts": ["world"], "segments": segments[1:], "language": "en"})
        yield last_event(request, tokens=2)
        return
    wants_audio = "audio" in (request.modalities or ())
    for seq, word in enumerate(words):
        if request.task != "speech":
            yield text_event(request, word, seq)
        if wants_audio:
            yield audio_event(request, speech_of(1), seq)
    yield last_event(request, tokens=len(words))


class FakeEngine:
    """Runs `script` for every request and keeps what happened. `live` holds the ids that are not over yet."""

    def __init__(self, script: Script = helpful, **limits: int) -> None:
        self.script = script
        self.config = fake_config(**limits)
        self.pipeline = PIPELINE
        self.timelines = Timelines(TraceConfig())
        self.requests: list[OmniRequest] = []
        self.media: list[Media] = []
        self.live: set[str] = set()
        self.closed_early: list[str] = []
        self.aborted: list[str] = []
        self.yielded = 0
        self.payloads: list[MultimodalPayload] = []
        self.report = Health(ready=True, healthy=True, draining=False, replicas=[])
        self.idle = asyncio.Event()

    async def generate(self, request: OmniRequest, media: Media | None = None) -> AsyncIterator[OmniRequestOutput]:
        self.requests.append(request)
        self.media.append(media or {})
        self.live.add(request.id)
        self.idle.clear()
        finished = False
        try:
            async for event in self.script(request, media or {}):
                self.yielded += 1
                finished = event.finished
                if event.payload is not None:
                    self.payloads.append(event.payload)
                yield event
        finally:
            self.live.discard(request.id)
            if not finished:
                self.closed_early.append(request.id)
            if not self.live:
                self.idle.set()

    async def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return request_id in self.live

    def health(self) -> Health:
        return self.report

    def render_metrics(self) -> bytes:
        return b"# HELP fake_total x\n# TYPE fake_total counter\nfake_total 1\n"

    def fail_stage(self, stage: str) -> None:
        replica = ReplicaHealth(stage=stage, replica=0, state="failed", detail="exit code 9")
        self.report = Health(ready=False, healthy=False, draining=False, replicas=[replica])
