"""Requests in the form of tests, given to the whole engine or straight to a stage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from omnistage.config.model import OmniConfig
from omnistage.config.resolve import resolve_config
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.entrypoints.omni import OmniResult, ResultBuilder
from omnistage.models.hunyuan_image3.drawing_stage import Drawer
from omnistage.models.hunyuan_image3.flight import Flight
from omnistage.models.hunyuan_image3.pipeline import plan
from omnistage.models.hunyuan_image3.text_stage import Talk
from omnistage.payload import Array, MultimodalPayload
from omnistage.request import OmniRequest
from omnistage.sampling import sampling_params
from omnistage.stages.ar.engine import AREngine
from omnistage.stages.base import Emission, InputChunk, StageRequest

FOLDER = Path(__file__).parent / "data"
REFERENCE: dict[str, Any] = json.loads((FOLDER / "reference.json").read_text())
Media = dict[str, MultimodalPayload]


def small_checkpoint(folder: Path) -> Path:
    """Writes the checkpoint with sizes around 64 x 64 instead of 256 x 256: a sixteenth of the autoencoder's work."""
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("reference.*", "distil_overlay"))
    config = json.loads((folder / "config.json").read_text()) | {"image_base_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace("<img_size_512>", "<img_size_64>"))
    return folder


def pictures() -> dict[str, Array]:
    """The pictures of the scenarios, and small ones (two alike, a square)."""
    draw = np.random.RandomState(7)
    shapes = {"a": (128, 512, 3), "b": (128, 512, 3), "c": (256, 256, 3)}
    shapes |= {"s": (32, 128, 3), "t": (32, 128, 3), "q": (64, 64, 3)}
    return {name: draw.randint(0, 256, shape, np.uint8) for name, shape in shapes.items()}


# An edit for the small checkpoint.
SMALL_EDIT: dict[str, Any] = {
    "prompt": "a red cat", "system_prompt": "You draw.", "size": "64x64", "images": ["s", "q"], "bot_task": "image",
    "num_inference_steps": 2, "seed": 42,
}  # fmt: skip
# The scenarios of the reference; `images` name pictures.
SCENARIOS: dict[str, dict[str, Any]] = {
    "t2i": {"prompt": "a red cat", "system_prompt": "You draw.", "size": "320x192", "seed": 42},
    "t2i_pretrain": {
        "prompt": "a red cat", "sequence_template": "pretrain", "size": "320x192", "guidance_scale": 5.0, "seed": 42,
    },
    "cot": {"prompt": "a blue door", "bot_task": "think_recaption", "size": "auto", "seed": 42},
    "ratio": {"prompt": "a blue door", "bot_task": "image", "size": "auto", "seed": 1},
    "edit": {
        "prompt": "a red cat", "system_prompt": "You draw.", "size": "256x256", "images": ["a"],
        "num_inference_steps": 2, "seed": 42,
    },
    "edit2": {
        "prompt": "a red cat", "system_prompt": "You draw.", "size": "512x128", "images": ["a", "c"],
        "num_inference_steps": 2, "seed": 42,
    },
    "distil": {"prompt": "a red cat", "system_prompt": "You draw.", "size": "320x192", "seed": 42},
}  # fmt: skip


def submission(
    request_id: str, ask: dict[str, Any], modalities: Sequence[str] | None, task: str = "image"
) -> tuple[OmniRequest, Media]:
    """The request that a client would send, and its pictures."""
    fields = dict(ask)
    media = {name: MultimodalPayload.of(image=pictures()[name]) for name in fields.pop("images", [])}
    prompt, messages, seed = fields.pop("prompt", None), fields.pop("messages", None), fields.pop("seed", 42)
    if media:
        fields["images"] = [{"media": name} for name in media]
    request = OmniRequest(
        id=request_id,
        task=task,
        prompt=prompt,
        messages=messages,
        seed=seed,
        modalities=None if modalities is None else tuple(modalities),
        sampling=fields.pop("sampling", {}),
        params=fields,
    )
    return request, media


async def answer(
    engine: AsyncOmniEngine,
    request_id: str,
    ask: dict[str, Any],
    modalities: Sequence[str] | None = ("text", "latents"),
    task: str = "image",
) -> OmniResult:
    request, media = submission(request_id, ask, modalities, task)
    builder = ResultBuilder(request_id)
    async for output in engine.generate(request, media):
        builder.add(output)
    return builder.result()


def config(variant: str = "dit", folder: Path = FOLDER, **overrides: Any) -> OmniConfig:
    settings = {"variant": variant, "dtype": "float32", "placement": "inline"} | overrides
    if variant != "dit":
        settings.setdefault("stages.ar.kv_memory_mb", 8)
    return resolve_config(str(folder), None, settings)


def overrides(variant: str, **more: Any) -> dict[str, Any]:
    """For `tests.engines.running`."""
    settings = {"variant": variant, "dtype": "float32"} | more
    return settings | ({} if variant == "dit" else {"stages.ar.kv_memory_mb": 8})


def visit(
    ask: dict[str, Any],
    stage: str = "dit",
    *,
    variant: str = "dit",
    folder: Path = FOLDER,
    request_id: str = "r",
    handover: bool = True,
) -> tuple[StageRequest, list[InputChunk]]:
    """A request as a stage sees it, and the chunks of its pictures."""
    outputs = ("image", "latents") if stage == "dit" else ("text",)
    request, media = submission(request_id, ask, ("text", "latents") if variant == "ar_dit" else outputs)
    switch = {"stages.dit.kv_handover": handover} if variant == "ar_dit" else {}
    settings = config(variant, folder, **switch)
    planned = plan(request, media, settings)
    chunks = [
        InputChunk(request_id=request_id, port=item.port, seq=0, final=True, payload=item.payload)
        for item in planned.inputs
    ]
    handed = ("thoughts", "kv") if stage == "dit" and "ar" in planned.stages else ()
    return (
        StageRequest(
            request_id=request_id,
            inputs=(*(item.port for item in planned.inputs), *handed),
            outputs=(*outputs, "thoughts", "kv") if stage == "ar" else outputs,
            params=planned.params[stage],
            sampling=sampling_params(stage, planned.params[stage].get("sampling", {}), request.sampling.get(stage, {})),
            seed=request.seed or 0,
        ),
        chunks,
    )


def begin(drawer: Drawer, ask: dict[str, Any], **where: Any) -> Flight:
    """A request that is ready to be encoded."""
    request, chunks = visit(ask, **where)
    flight = drawer.open(request)
    for chunk in chunks:
        drawer.feed(flight, chunk)
    return flight


def draw(drawer: Drawer, flights: list[Flight]) -> list[Array]:
    """Runs requests to their last step together; their final latents [1, C, h, w]."""
    drawer.encode(flights)
    for flight in flights:
        drawer.prepare(flight)
    while busy := [flight for flight in flights if drawer.remaining(flight)]:
        drawer.denoise(busy)
    return [flight.ready().latents.numpy() for flight in flights]


def think(engine: AREngine[Talk], ask: dict[str, Any], **where: Any) -> list[Emission]:
    """Everything that the text stage gives out for a request of the deployment `ar_dit`."""
    request, chunks = visit(ask, "ar", variant="ar_dit", **where)
    engine.add(request)
    for chunk in chunks:
        engine.feed(chunk)
    emissions: list[Emission] = []
    while engine.has_work():
        output = engine.step()
        emissions += output.emissions
        assert all(end.error is None for end in output.finished)
    engine.check_integrity()
    return emissions


def handed(emissions: list[Emission]) -> list[InputChunk]:
    """The chunks of a text stage for the drawing stage."""
    chunks: list[InputChunk] = []
    for port in ("thoughts", "kv"):
        own = [emission for emission in emissions if emission.port == port]
        chunks += [
            InputChunk(request_id=e.request_id, port=port, seq=seq, final=e.final, payload=e.payload)
            for seq, e in enumerate(own)
        ]
    return chunks


def begin_handed(drawer: Drawer, ask: dict[str, Any], chunks: list[InputChunk], **where: Any) -> Flight:
    """A request in the drawing stage of `ar_dit` that has got what the text stage gave."""
    flight = begin(drawer, ask, variant="ar_dit", **where)
    for chunk in chunks:
        payload = MultimodalPayload(dict(chunk.payload.tensors), dict(chunk.payload.meta))
        drawer.feed(flight, msgspec.structs.replace(chunk, payload=payload))
    assert drawer.ready(flight)
    return flight
