"""Requests in the form of tests (arrays in the parameters), given to the whole engine or straight to a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from omnistage.config.model import OmniConfig, StageContext
from omnistage.config.registry import load_pipeline
from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.omni import OmniResult, ResultBuilder
from omnistage.models.minimax_h3.pipeline import plan
from omnistage.models.minimax_h3.stages import H3Diffusion, whole
from omnistage.models.minimax_h3.state import H3State
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.diffusion.engine import DiffusionEngine
from tests.models.minimax_h3 import tiny
from tests.models.minimax_h3.reference import Outcome
from tests.stages.diffusion.fakes import AtOnce

FP32 = {"placement": "inline", "dtype": "float32"}
ASKS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "A red fox trots.", "height": 32, "width": 64, "num_frames": 124, "num_inference_steps": 4},
    "first": {"prompt": "It comes alive.", "image": tiny.picture(1, 48, 80), "num_inference_steps": 3},
    "last": {
        "prompt": "Then it ends.", "last_image": tiny.picture(2, 60, 33), "num_inference_steps": 5, "flow_shift": 6.0,
        "audio_flow_shift": 2.0,
    },
    "both": {
        "prompt": "From here to there.", "image": tiny.picture(3, 60, 60), "last_image": tiny.picture(4, 48, 80),
        "num_frames": 130, "num_inference_steps": 3,
    },
    "pictures": {
        "prompt": "The subject waves.",
        "references": [{"image": tiny.picture(5, 96, 64)}, {"image": tiny.picture(6, 64, 64)}],
        "height": 32, "width": 64, "num_frames": 124, "num_inference_steps": 3,
    },
    "mixed": {
        "prompt": "All of them.", "height": 64, "width": 32, "num_frames": 124, "num_inference_steps": 3,
        "references": [
            {"audio": (tiny.sound(7, 0.7, 1), tiny.RATE)},
            {"video": tiny.clip(8, 30), "fps": 15.0, "audio": (tiny.sound(9, 1.0, 2), tiny.RATE)},
            {"image": tiny.picture(10, 64, 64)},
            {"video": tiny.clip(11, 40), "fps": 24.0},
        ],
    },
}  # fmt: skip


def submission(
    request_id: str, seed: int, ask: dict[str, Any], **fields: Any
) -> tuple[OmniRequest, dict[str, MultimodalPayload]]:
    """The request that a client would send, and its media."""
    media: dict[str, MultimodalPayload] = {}
    params = {key: value for key, value in ask.items() if key != "prompt"}

    def put(kind: str, array: np.ndarray, **meta: Any) -> dict[str, str]:
        key = f"{kind}{len(media)}"
        media[key] = MultimodalPayload.of(meta, **{kind: array})
        return {"media": key}

    def reference(item: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {key: put(key, item[key]) for key in ("image", "video") if key in item}
        if "audio" in item:
            made["audio"] = put("audio", item["audio"][0], sample_rate=item["audio"][1])
        return made | ({"fps": item["fps"]} if "fps" in item else {})

    for name in ("image", "last_image", "latents", "audio_latents"):
        if name in params:
            params[name] = put(name.removeprefix("last_"), params[name])
    if "references" in params:
        params["references"] = [reference(item) for item in params["references"]]
    fields.setdefault("task", "video")
    request = OmniRequest(
        id=request_id, prompt=ask["prompt"], seed=seed, params=params | {"return_latents": True}, **fields
    )
    return request, media


async def answer(engine: AsyncOmniEngine, request_id: str, seed: int, ask: dict[str, Any], **fields: Any) -> OmniResult:
    request, media = submission(request_id, seed, ask, **fields)
    builder = ResultBuilder(request_id)
    async for output in engine.generate(request, media):
        builder.add(output)
    return builder.result()


def assert_equals_reference(result: OmniResult | dict[str, Any], right: Outcome, tolerance: float = 1e-4) -> None:
    """Latents and sound within `tolerance`, pictures within one level."""
    if isinstance(result, OmniResult):
        assert result.error is None, result.error
    tensors = result.tensors if isinstance(result, OmniResult) else result
    for name, array in (("latents", right.latents), ("audio_latents", right.audio_latents), ("audio", right.audio)):
        assert tensors[name].shape == array.shape
        assert tensors[name].dtype == np.float32
        assert np.abs(tensors[name] - array).max() <= tolerance, name
    assert tensors["video"].shape == right.video.shape
    assert np.abs(tensors["video"].astype(int) - right.video).max() <= 1


def context(folder: Path, overrides: dict[str, Any] | None = None, stage: str = "diffusion") -> StageContext:
    config = resolve_config(str(folder), None, FP32 | (overrides or {}))
    specs = load_pipeline(config.pipeline).variants[config.variant].stages
    spec = next(spec for spec in specs if spec.name == stage)
    return StageContext(config=config, stage=config.stages[stage], spec=spec, model_path=config.model_path)


class OneStage:
    """The default variant's stage, stepped by hand. `transformer_calls` counts calls of the real modules."""

    def __init__(self, folder: Path, overrides: dict[str, Any] | None = None) -> None:
        made = context(folder, overrides)
        model = whole(made)
        assert isinstance(model, H3Diffusion)
        self.config: OmniConfig = made.config
        self.model = model
        self.engine: DiffusionEngine[H3State] = DiffusionEngine(model, made.stage, lambda: None, executor=AtOnce())
        self.finished: dict[str, dict[str, Any]] = {}
        self.skipped: dict[str, float] = {}

    def add(self, request_id: str, seed: int, ask: dict[str, Any]) -> None:
        request, media = submission(request_id, seed, ask)
        route = plan(request, media, self.config)
        self.engine.add(
            StageRequest(
                request_id=request_id,
                inputs=tuple(item.port for item in route.inputs),
                outputs=route.outputs,
                params=route.params["diffusion"],
                seed=seed,
            )
        )
        for item in route.inputs:
            self.engine.feed(InputChunk(request_id=request_id, port=item.port, seq=0, final=True, payload=item.payload))
        self.finished[request_id] = {}

    def step(self) -> None:
        output = self.engine.step()
        self.skipped |= {done.request_id: done.metrics.extra["skipped_steps"] for done in output.finished}
        for emission in output.emissions:
            got = self.finished[emission.request_id]
            for name, tensor in emission.payload.tensors.items():
                got[name] = np.concatenate([got[name], tensor.array]) if name in got else tensor.array

    def run(self) -> dict[str, dict[str, Any]]:
        """Steps until nothing is left; tensors by request and name."""
        while self.engine.has_work():
            self.step()
        self.engine.check_integrity()
        return self.finished
