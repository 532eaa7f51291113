"""The graphs of Cosmos3: one stage `diffusion`, or `reasoner` -> `generator` that each load half of the weights; and
`reasoner` alone, which answers questions in text."""

from __future__ import annotations

from pathlib import Path

from omnistage.config.model import (
    EdgeSpec,
    OmniConfig,
    OptionSpec,
    PipelineConfig,
    RequestPlan,
    StageSpec,
    TextMarkup,
    Variant,
)
from omnistage.models.cosmos3.answer_request import plan_answer
from omnistage.models.cosmos3.ask import START, Limits, resolve
from omnistage.models.cosmos3.checkpoint import read_checkpoint
from omnistage.models.cosmos3.footprint import footprint
from omnistage.models.cosmos3.request import LATENTS, MEDIA_PORTS, OUTPUTS, as_image, outputs_of, read_request
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from omnistage.stages.diffusion.model import BATCHING
from omnistage.stages.diffusion.step_caching import STEP_CACHE

_CACHE = OptionSpec(
    type="int", default=1024, minimum=0, help="MiB of text keys and values kept for requests with equal texts"
)
_TYPES = {"image": "image", "actions": "actions"} | {f"{START}{name}": "latents" for name in LATENTS}
_INPUTS = {port: _TYPES.get(port, "video") for port in MEDIA_PORTS}
_OUTPUTS = {port: port for port in OUTPUTS}
# A 720p video of 189 frames has 44160 rows per guidance branch.
_ROWS = 1 << 17
_CAPABILITIES = frozenset(
    {"image", "video", "audio", "action", "seed", "step_batching", "request_batching", "step_cache", "partial_images"}
)


def _denoising_stage(name: str, component: str, *, with_kv: bool) -> StageSpec:
    return StageSpec(
        name=name,
        kind="diffusion",
        component=f"omnistage.models.cosmos3.stage:{component}",
        inputs=_INPUTS | ({"kv": "kv"} if with_kv else {}),
        outputs=_OUTPUTS,
        options={"batching": BATCHING} | STEP_CACHE | ({} if with_kv else {"reasoner_cache_mb": _CACHE}),
        defaults={"max_num_seqs": 16, "token_budget": _ROWS, "arena_mb": 256},
        capabilities=_CAPABILITIES,
    )


def _media_edges(stage: str) -> tuple[EdgeSpec, ...]:
    inputs = tuple(EdgeSpec(f"client.{port}", f"{stage}.{port}") for port in MEDIA_PORTS)
    return (*inputs, *(EdgeSpec(f"{stage}.{port}", f"client.{port}") for port in OUTPUTS))


_REASONER = StageSpec(
    name="reasoner",
    kind="generation",
    component="omnistage.models.cosmos3.reasoner_stage:reasoner",
    outputs={"kv": "kv"},
    options={"reasoner_cache_mb": _CACHE},
    defaults={"max_num_seqs": 16, "arena_mb": 512},
)


_ANSWERS = StageSpec(
    name="reasoner",
    kind="ar",
    component="omnistage.models.cosmos3.answer_stage:create",
    inputs={"media": "media"},
    outputs={"text": "text"},
    objective="ttft",
    defaults={"arena_mb": 64},
    capabilities=frozenset({"text", "logprobs", "seed", "image_input", "video_input", "structured"}),
    markup=TextMarkup(tool_format="hermes", reasoning=("<think>", "</think>")),
)


def plan(request: OmniRequest, media: dict[str, MultimodalPayload], config: OmniConfig) -> RequestPlan:
    """All stages of the variant resolve the same parameters; media go to the stage that denoises.

    Raises RequestError naming the parameter that the checkpoint cannot do.
    """
    if config.variant == "answers":
        return plan_answer(request, media)
    if request.task == "image":
        request = as_image(request)
    reading = read_request(request, media)
    limits = Limits(config.limits.max_video_frames, config.limits.max_image_pixels)
    ask = resolve(reading.params, read_checkpoint(Path(config.model_path)), limits)
    stages = tuple(config.stages)
    return RequestPlan(
        stages=stages,
        params=dict.fromkeys(stages, reading.params),
        inputs=reading.inputs,
        outputs=outputs_of(request, ask, reading.latents),
    )


def variant_for(folder: str) -> str:
    """A folder without a diffusion index holds the reasoner only."""
    indexes = ("model_index.json", "modular_model_index.json")
    return "default" if any((Path(folder) / name).is_file() for name in indexes) else "answers"


PIPELINE = PipelineConfig(
    name="cosmos3",
    variants={
        "default": Variant(
            stages=(_denoising_stage("diffusion", "diffusion", with_kv=False),), edges=_media_edges("diffusion")
        ),
        "split": Variant(
            stages=(_REASONER, _denoising_stage("generator", "generator", with_kv=True)),
            edges=(EdgeSpec("reasoner.kv", "generator.kv"), *_media_edges("generator")),
        ),
        "answers": Variant(
            stages=(_ANSWERS,),
            edges=(EdgeSpec("client.media", "reasoner.media"), EdgeSpec("reasoner.text", "client.text")),
        ),
    },
    plan=plan,
    tasks=("video", "image", "action", "chat", "completion"),
    architectures=(
        "Cosmos3OmniPipeline",
        "Cosmos3OmniModularPipeline",
        "Cosmos3DistilledModularPipeline",
        "Cosmos3OmniForConditionalGeneration",
        "Cosmos3EdgeForConditionalGeneration",
    ),
    variant_for=variant_for,
    description="Cosmos3: images, videos with sound, robot actions, control videos",
    footprint=footprint,
)
