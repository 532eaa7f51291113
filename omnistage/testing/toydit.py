"""toydit: a denoiser whose picture is known in closed form from prompt, seed, steps and guidance. No torch anywhere.

`picture` below is the whole formula; the stage gets there step by step, like a real model.
"""

from __future__ import annotations

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
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from omnistage.stages.diffusion.model import BATCHING

DELAY = OptionSpec(type="float", default=0.0, minimum=0.0, maximum=10.0, help="seconds that each step sleeps")
MODALITIES = ("image", "progress", "partial", "latents")

STAGE = StageSpec(
    name="dit",
    kind="diffusion",
    component="omnistage.testing.toydit_stage:dit",
    inputs={"text": "text"},
    outputs={name: name for name in MODALITIES},
    options={
        "batching": BATCHING,
        "step_delay_s": DELAY,
        "decode_delay_s": DELAY,
    },
    defaults={"max_num_seqs": 64, "token_budget": 1 << 16, "arena_mb": 8},
    capabilities=frozenset({"image", "seed", "step_batching", "request_batching", "partial_images"}),
    torch=False,
)
_EDGES = (
    EdgeSpec("client.text", "dit.text"),
    *(EdgeSpec(f"dit.{name}", f"client.{name}") for name in MODALITIES),
)


def plan(request: OmniRequest, media: dict[str, MultimodalPayload], config: OmniConfig) -> RequestPlan:
    """The picture of `prompt`; modalities also take "progress" and "partial" (streamed) and "latents"."""
    prompt, params, outputs = read_request(request, media)
    text = ClientInput(port="text", payload=MultimodalPayload.text(prompt))
    return RequestPlan(stages=("dit",), params={"dit": params}, inputs=[text], outputs=outputs)


def read_request(
    request: OmniRequest, media: dict[str, MultimodalPayload]
) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Prompt, parameters of the stage, client ports. Raises RequestError."""
    if media:
        raise RequestError("toydit takes text only", param="image")
    prompt = request.prompt if request.prompt is not None else request.raw_prompt
    if prompt is None:
        raise RequestError("prompt is required", param="prompt")
    wanted = tuple(request.modalities or ("image",))
    unknown = sorted(set(wanted) - set(MODALITIES))
    if unknown:
        raise RequestError(f"no modality {unknown[0]!r}; toydit gives {', '.join(MODALITIES)}", param="modalities")
    params = dict(request.params)
    size = params.pop("size", "auto")
    if size != "auto":
        width, _, height = str(size).partition("x")
        params |= {"width": int(width), "height": int(height)}
    latents = ("latents",) if params.pop("return_latents", False) else ()
    return prompt, params, tuple(dict.fromkeys((*wanted, *latents)))


PIPELINE = PipelineConfig(
    name="toydit",
    variants={"default": Variant(stages=(STAGE,), edges=_EDGES)},
    plan=plan,
    tasks=("image", "chat"),
    description="closed-form test pipeline: a picture that is a known function of prompt, seed, steps and guidance",
)
