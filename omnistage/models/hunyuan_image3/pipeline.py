"""HunyuanImage-3.0's graphs: text alone, pictures alone, or text whose keys and values the pictures start from.

Torch-free. `ar` reads pictures and writes text; `dit` draws and edits; `ar_dit` thinks, chooses the size and draws.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from omnistage.config.model import (
    ClientInput,
    EdgeSpec,
    OmniConfig,
    OptionSpec,
    PipelineConfig,
    RequestPlan,
    StageSpec,
    Variant,
)
from omnistage.errors import RequestError
from omnistage.models.hunyuan_image3.ask import Ask, write_ask
from omnistage.models.hunyuan_image3.checkpoint import Checkpoint, read_checkpoint
from omnistage.models.hunyuan_image3.footprint import footprint
from omnistage.models.hunyuan_image3.request import DRAWN, Deployment, Reading, read_request
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from omnistage.stages.diffusion.model import BATCHING

_PACKAGE = "omnistage.models.hunyuan_image3"
_DRAWING_PORTS = (*DRAWN, "progress")
# A picture of 1024 x 1024 has 4097 rows per guidance row and step.
_ROWS = 1 << 16
_HANDOVER = OptionSpec(
    type="bool", default=True, help="start from the keys and values of the text stage instead of computing them again"
)

_AR: dict[str, Any] = {
    "name": "ar",
    "kind": "ar",
    "component": f"{_PACKAGE}.text_stage:create",
    "inputs": {"media": "media"},
    "objective": "ttft",
    "defaults": {"kv_memory_mb": 2048, "token_budget": 2048},
    "capabilities": frozenset({"text", "image_input", "logprobs", "seed"}),
}
AR_ALONE = StageSpec(**_AR, outputs={"text": "text"})
AR = StageSpec(
    **(_AR | {"defaults": _AR["defaults"] | {"arena_mb": 64}}),
    outputs={"text": "text", "thoughts": "thoughts", "kv": "kv"},
)
_DIT: dict[str, Any] = {
    "name": "dit",
    "kind": "diffusion",
    "component": f"{_PACKAGE}.drawing_stage:create",
    "outputs": {name: name for name in _DRAWING_PORTS},
    "capabilities": frozenset({"image", "image_edit", "seed", "step_batching", "request_batching", "partial_images"}),
}
_DIT_DEFAULTS: dict[str, Any] = {"max_num_seqs": 16, "token_budget": _ROWS, "arena_mb": 64}
DIT_ALONE = StageSpec(**_DIT, inputs={"media": "media"}, options={"batching": BATCHING}, defaults=_DIT_DEFAULTS)
# Both stages hold nearly the whole checkpoint, so they live in one process, which loads it once.
DIT = StageSpec(
    **_DIT,
    inputs={"media": "media", "thoughts": "thoughts", "kv": "kv"},
    options={"batching": BATCHING, "kv_handover": _HANDOVER},
    defaults=_DIT_DEFAULTS | {"placement": "inline", "co_located_with": "ar"},
)
_DRAWN_EDGES = tuple(EdgeSpec(f"dit.{name}", f"client.{name}") for name in _DRAWING_PORTS)


@lru_cache(maxsize=8)
def _checkpoint(path: str) -> Checkpoint:
    return read_checkpoint(Path(path))


def plan(request: OmniRequest, media: dict[str, MultimodalPayload], config: OmniConfig) -> RequestPlan:
    """The route of a request. Raises RequestError naming the field that the deployment or checkpoint cannot do."""
    checkpoint = _checkpoint(config.model_path)
    handover = config.variant == "ar_dit" and bool(config.stages["dit"].options["kv_handover"])
    deployment = Deployment(config.variant != "dit", config.variant != "ar", handover)
    reading = read_request(request, media, checkpoint, deployment)
    stages = _stages(reading, config.variant)
    params: dict[str, dict[str, Any]] = dict.fromkeys(stages, write_ask(reading.ask))
    if "ar" in stages:
        params["ar"] = params["ar"] | {"sampling": _sampling(reading.ask, checkpoint, config)}
    payload = MultimodalPayload(reading.pictures)
    return RequestPlan(
        stages=stages,
        params=params,
        inputs=[ClientInput(port="media", payload=payload)] if reading.pictures else [],
        outputs=reading.outputs,
    )


def _stages(reading: Reading, variant: str) -> tuple[str, ...]:
    """The stages that a request visits, of those that the deployment has."""
    draws = any(name in DRAWN for name in reading.outputs)
    thinks = bool(reading.ask.task)
    if draws and variant == "ar":
        raise RequestError("this deployment writes text only (variant ar)", param="modalities")
    if variant == "dit":
        if not draws:
            raise RequestError("this deployment draws pictures only (variant dit)", param="modalities")
        if thinks:
            raise RequestError("this deployment has no text stage (variant dit): use bot_task image", param="bot_task")
    if not draws and not thinks:
        raise RequestError("bot_task image with a size has no text to give; ask for the picture", param="modalities")
    return ("ar",) * thinks + ("dit",) * draws


def _sampling(ask: Ask, checkpoint: Checkpoint, config: OmniConfig) -> dict[str, Any]:
    """The checkpoint's sampling, where the deploy file says nothing. Thoughts end with their tags, not with the end
    token."""
    settled = config.stages["ar"].sampling
    sampling = {key: value for key, value in checkpoint.defaults.sampling.items() if key not in settled}
    if ask.task != "answer":
        sampling["ignore_eos"] = True
    return sampling


PIPELINE = PipelineConfig(
    name="hunyuan_image3",
    variants={
        "ar": Variant(
            stages=(AR_ALONE,), edges=(EdgeSpec("client.media", "ar.media"), EdgeSpec("ar.text", "client.text"))
        ),
        "dit": Variant(stages=(DIT_ALONE,), edges=(EdgeSpec("client.media", "dit.media"), *_DRAWN_EDGES)),
        "ar_dit": Variant(
            stages=(AR, DIT),
            edges=(
                EdgeSpec("client.media", "ar.media"),
                EdgeSpec("client.media", "dit.media"),
                EdgeSpec("ar.text", "client.text"),
                EdgeSpec("ar.thoughts", "dit.thoughts"),
                EdgeSpec("ar.kv", "dit.kv"),
                *_DRAWN_EDGES,
            ),
        ),
    },
    plan=plan,
    tasks=("image", "chat"),
    default_variant="ar_dit",
    architectures=("HunyuanImage3ForCausalMM",),
    description="HunyuanImage-3.0: pictures from text and pictures, with thoughts, and answers about pictures",
    footprint=footprint,
)
