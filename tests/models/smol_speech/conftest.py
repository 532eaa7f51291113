"""The real models, loaded once per session from the default cache (fetched there by the first run)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.config.model import LimitsConfig, OmniConfig, StageConfig, StageContext
from omnistage.models.smol_speech import code2wav, listener, talker
from omnistage.models.smol_speech.code2wav import Code2Wav
from omnistage.models.smol_speech.hearing import Recogniser
from omnistage.models.smol_speech.pipeline import PIPELINE
from omnistage.models.smol_speech.talker import Talker
from omnistage.payload import MultimodalPayload
from omnistage.stages.base import InputChunk, StageRequest, StepOutput
from omnistage.stages.generation.engine import GenerationEngine

torch.set_num_threads(1)

Array = np.ndarray[Any, np.dtype[np.float32]]
Speak = Callable[..., list[Array]]


def context(name: str, **options: int) -> StageContext:
    """The context of a stage with its declared options, as the launcher builds it."""
    spec = next(stage for stage in PIPELINE.variants["default"].stages if stage.name == name)
    values = {option: declared.default for option, declared in spec.options.items()} | options
    stage = StageConfig(name=name, kind=spec.kind, threads=1, options=values, objective=spec.objective, max_num_seqs=32)
    config = OmniConfig(
        model="smol-speech",
        model_path="",
        pipeline="smol-speech",
        variant="default",
        stages={name: stage},
        edges={},
        limits=LimitsConfig(),
    )
    return StageContext(config=config, stage=stage, spec=spec, model_path="")


@pytest.fixture(scope="session")
def real_talker() -> Talker:
    return talker.create(context("talker"))


@pytest.fixture(scope="session")
def real_code2wav() -> Code2Wav:
    return code2wav.create(context("code2wav"))


@pytest.fixture(scope="session")
def recogniser() -> Recogniser:
    return listener.create(context("listener"))._recogniser


class Speaker:
    """Talker and code2wav behind their engines, joined as the orchestrator joins them."""

    def __init__(self, first: Talker, second: Code2Wav) -> None:
        self.talker = GenerationEngine(first, context("talker").stage)
        self.wave = GenerationEngine(second, context("code2wav").stage)
        self.audio: dict[str, list[Array]] = {}
        self.rates: set[int] = set()

    def say(self, name: str, text: str, voice: str = "heart", speed: float = 1.0, seed: int = 3) -> None:
        params = {"voice": voice, "speed": speed}
        for engine in (self.talker, self.wave):
            engine.add(StageRequest(request_id=name, params=params, seed=seed))
        self.audio[name] = []
        chunk = InputChunk(request_id=name, port="text", seq=0, final=True, payload=MultimodalPayload.text(text))
        self.talker.feed(chunk)

    def drain(self) -> None:
        while self.talker.has_work() or self.wave.has_work():
            self._hand_over(self.talker.step())
            self._collect(self.wave.step())
            self.talker.check_integrity()
            self.wave.check_integrity()

    def _hand_over(self, output: StepOutput) -> None:
        for item in output.emissions:
            payload = MultimodalPayload(item.payload.tensors, item.payload.meta)
            self.wave.feed(
                InputChunk(request_id=item.request_id, port="frames", seq=0, final=item.final, payload=payload)
            )

    def _collect(self, output: StepOutput) -> None:
        for item in output.emissions:
            self.audio[item.request_id].append(item.payload["audio"][0])
            self.rates.add(item.payload.meta["sample_rate"])

    def wave_of(self, name: str) -> Array:
        return np.concatenate(self.audio[name])


@pytest.fixture
def speaker(real_talker: Talker, real_code2wav: Code2Wav) -> Speaker:
    return Speaker(real_talker, real_code2wav)
