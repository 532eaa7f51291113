"""The three engines in one thread, stepped in any order: schedules that a running server meets only by chance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from omnistage.config.model import LimitsConfig, OmniConfig, RequestPlan, StageConfig, StageContext
from omnistage.models.qwen3_omni.code2wav import Code2Wav
from omnistage.models.qwen3_omni.loading import Code2WavPart, load_part
from omnistage.models.qwen3_omni.pipeline import PIPELINE, plan
from omnistage.models.qwen3_omni.streaming import StreamingVocoder
from omnistage.models.qwen3_omni.talker import Talker
from omnistage.models.qwen3_omni.thinker import Thinker
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, StageMetrics
from omnistage.sampling import sampling_params
from omnistage.stages.ar.engine import AREngine
from omnistage.stages.ar.torch_backend import TorchBackend
from omnistage.stages.base import InputChunk, StageRequest, StepOutput
from omnistage.stages.generation.engine import GenerationEngine
from tests.models.qwen3_omni.reference import media

STAGES = ("thinker", "talker", "code2wav")
_NEXT = {"speech": "talker", "codes": "code2wav"}


def config_of(folder: Path | str, variant: str = "default", **stage: Any) -> OmniConfig:
    """A resolved configuration as the engine has it; `stage` fields apply to every stage."""
    stages = {}
    for spec in PIPELINE.variants[variant].stages:
        options = {name: option.default for name, option in spec.options.items()}
        fields = {"dtype": "float32", "device": "cpu", "block_size": 4, "kv_memory_mb": 4, **stage}
        stages[spec.name] = StageConfig(
            name=spec.name, kind=spec.kind, options=options, sampling=spec.sampling, **fields
        )
    return OmniConfig(
        model="tiny",
        model_path=str(folder),
        pipeline="qwen3_omni",
        variant=variant,
        stages=stages,
        edges={},
        limits=LimitsConfig(),
    )


def context_of(config: OmniConfig, name: str) -> StageContext:
    spec = next(spec for spec in PIPELINE.variants[config.variant].stages if spec.name == name)
    return StageContext(config=config, stage=config.stages[name], spec=spec, model_path=config.model_path)


class Models:
    """The models of the three stages, loaded once."""

    def __init__(self, folder: Path) -> None:
        self.config = config_of(folder)
        self.thinker = Thinker(context_of(self.config, "thinker"))
        self.talker = Talker(context_of(self.config, "talker"))
        part, self.device, _ = load_part(Code2WavPart, str(folder), self.config.stages["code2wav"])
        self.vocoder = StreamingVocoder(part.code2wav, max_frames=32)


@dataclass
class Heard:
    """What a client got of one request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    codes: list[Any] = field(default_factory=list)
    waves: list[Any] = field(default_factory=list)
    finished: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, StageMetrics] = field(default_factory=dict)

    @property
    def frames(self) -> Any:
        return np.concatenate(self.codes, axis=1) if self.codes else np.zeros((0, 0), np.int32)

    @property
    def wave(self) -> Any:
        return np.concatenate(self.waves) if self.waves else np.zeros(0, np.float32)


class Stages:
    """Engines over `models`; `blocks` are the KV blocks of thinker and talker, `chunks` first and later wave chunks."""

    def __init__(
        self,
        models: Models,
        *,
        budget: int = 64,
        block_size: int = 4,
        blocks: tuple[int, int] = (512, 1024),
        chunks: tuple[int, int] = (1, 25),
        caching: bool = True,
    ) -> None:
        fields: dict[str, Any] = {
            "token_budget": budget,
            "block_size": block_size,
            "max_num_seqs": 16,
            "prefix_caching": caching,
        }
        self.config = config_of(models.config.model_path, **fields)
        thinker, talker, wave = (self.config.stages[name] for name in STAGES)
        self.thinker: AREngine[Any] = AREngine(TorchBackend(models.thinker, thinker, blocks=blocks[0]), thinker)
        self.talker: AREngine[Any] = AREngine(TorchBackend(models.talker, talker, blocks=blocks[1]), talker)
        self.code2wav = GenerationEngine(Code2Wav(models.vocoder, models.device, *chunks), wave)
        self.engines: dict[str, Any] = {"thinker": self.thinker, "talker": self.talker, "code2wav": self.code2wav}
        self.heard: dict[str, Heard] = defaultdict(Heard)
        self.events: list[tuple[str, str]] = []
        self._plans: dict[str, RequestPlan] = {}
        self._requests: dict[str, OmniRequest] = {}
        self._sent: dict[tuple[str, str], int] = defaultdict(int)

    def add(self, request: OmniRequest) -> None:
        route = plan(request, media(), self.config)
        self._plans[request.id], self._requests[request.id] = route, request
        for name in route.stages:
            self.engines[name].add(self._stage_request(request, route, name))
        for given in route.inputs:
            self._feed("thinker", request.id, given.port, given.payload, final=True)

    def run(self, order: Iterable[str] = STAGES) -> None:
        """Steps stages in the given order, over and over, until none has work."""
        for name in cycle(order):
            if not any(engine.has_work() for engine in self.engines.values()):
                break
            self.step(name)
        for engine in self.engines.values():
            assert engine.request_ids() == frozenset()
            engine.check_integrity()

    def step(self, name: str) -> None:
        if self.engines[name].has_work():
            self._deliver(name, self.engines[name].step())

    def abort(self, request_id: str) -> None:
        for engine in self.engines.values():
            engine.abort(request_id)

    def _stage_request(self, request: OmniRequest, route: RequestPlan, name: str) -> StageRequest:
        speaks = "talker" in route.stages
        ports = {
            "thinker": (("media",) if route.inputs else (), ("text", "speech") if speaks else ("text",)),
            "talker": (("speech",), ("codes",)),
            "code2wav": (("codes",), ("audio",)),
        }
        sampling = request.sampling.get(name, {})
        return StageRequest(
            request_id=request.id,
            inputs=ports[name][0],
            outputs=ports[name][1],
            params=route.params.get(name, {}),
            sampling=sampling_params(name, self.config.stages[name].sampling, sampling),
            seed=request.seed or 0,
            priority=request.priority,
        )

    def _feed(self, name: str, request_id: str, port: str, payload: MultimodalPayload, *, final: bool) -> None:
        if request_id not in self.engines[name].request_ids():
            return
        seq = self._sent[request_id, port]
        self._sent[request_id, port] += 1
        copy = MultimodalPayload(payload.tensors, payload.meta)
        self.engines[name].feed(InputChunk(request_id=request_id, port=port, seq=seq, final=final, payload=copy))

    def _deliver(self, name: str, output: StepOutput) -> None:
        for item in output.emissions:
            heard = self.heard[item.request_id]
            self.events.append((item.request_id, item.port))
            if item.port == "text":
                heard.text += item.payload.meta.get("text", "")
                heard.token_ids += item.payload.meta.get("token_ids", [])
            if item.port == "codes" and item.payload.tensors:
                heard.codes.append(np.array(item.payload["codes"]))
            if item.port == "audio":
                heard.waves.append(np.array(item.payload["audio"][0]))
            if item.port in _NEXT:
                self._feed(_NEXT[item.port], item.request_id, item.port, item.payload, final=item.final)
        for end in output.finished:
            self.events.append((end.request_id, f"{name} ends"))
            self.heard[end.request_id].finished[name] = end.reason.value
            self.heard[end.request_id].metrics[name] = end.metrics
