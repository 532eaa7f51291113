"""Qwen3-Omni's graph: a thinker that hands rows to a talker, whose codes become a waveform. Torch-free."""

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
    TextMarkup,
    Variant,
)
from omnistage.models.qwen3_omni.checkpoint import has_talker
from omnistage.models.qwen3_omni.footprint import footprint
from omnistage.models.qwen3_omni.media import collect_media
from omnistage.models.qwen3_omni.request import conversation, read_params, validate
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest

_PACKAGE = "omnistage.models.qwen3_omni"
SAMPLE_RATE = 24000
# The speakers of the released checkpoints; a checkpoint's own list decides, whatever the case of the letters.
VOICES = ("Ethan", "Chelsie", "Aiden", "ethan", "chelsie", "aiden")
TEXT_ONLY = "thinker"

_THINKER: dict[str, Any] = {
    "name": "thinker",
    "kind": "ar",
    "component": f"{_PACKAGE}.thinker:create",
    "inputs": {"media": "media"},
    "objective": "ttft",
    "options": {
        "encoder_cache_mb": OptionSpec("int", 256, 0, 1 << 20, help="memory for encoded sounds and pictures, MiB"),
    },
    "sampling": {"temperature": 0.0},
    "capabilities": frozenset(
        {"text", "audio", "image", "video", "logprobs", "seed", "int4", "weight_layout", "structured"}
    ),
    "markup": TextMarkup(tool_format="hermes", reasoning=("<think>", "</think>")),
}
THINKER = StageSpec(**_THINKER, outputs={"text": "text", "speech": "thinker_rows"})
THINKER_ALONE = StageSpec(**_THINKER, outputs={"text": "text"})
TALKER = StageSpec(
    name="talker",
    kind="ar",
    component=f"{_PACKAGE}.talker:create",
    inputs={"speech": "thinker_rows"},
    outputs={"codes": "codes"},
    objective="ttfp",
    defaults={"prefix_caching": False},
    capabilities=frozenset({"weight_layout"}),
    options={
        "max_frames": OptionSpec("int", 4096, 1, 1 << 20, help="longest speech of a request that has no max_tokens"),
    },
    sampling={"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.05},
)
CODE2WAV = StageSpec(
    name="code2wav",
    kind="generation",
    component=f"{_PACKAGE}.code2wav:create",
    inputs={"codes": "codes"},
    outputs={"audio": "audio"},
    objective="ttfp",
    # Frames of all streams that are computed together; on a CPU more cost more per frame.
    defaults={"token_budget": 32},
    capabilities=frozenset({"weight_layout"}),
    options={
        "first_chunk_frames": OptionSpec("int", 1, 1, 4096, help="codec frames (80 ms) in a request's first packet"),
        "chunk_frames": OptionSpec("int", 25, 1, 4096, help="codec frames that later packets grow to, by doubling"),
    },
)
_TEXT_EDGES = (EdgeSpec("client.media", "thinker.media"), EdgeSpec("thinker.text", "client.text"))
_SPEECH_EDGES = (
    EdgeSpec("thinker.speech", "talker.speech"),
    EdgeSpec("talker.codes", "code2wav.codes"),
    EdgeSpec("talker.codes", "client.codes"),
    EdgeSpec("code2wav.audio", "client.audio"),
)


def plan(request: OmniRequest, media: dict[str, MultimodalPayload], config: OmniConfig) -> RequestPlan:
    """The route of a request: without speech the talker is never touched. Raises RequestError naming the field."""
    outputs = validate(request, speaks=config.variant != TEXT_ONLY)
    params = read_params(request.params)
    messages, payload = collect_media(conversation(request), media, params.mm_processor_kwargs)
    prompt: dict[str, Any] = {"raw_prompt": request.raw_prompt} if request.raw_prompt is not None else {}
    prompt = prompt or {"messages": messages}
    if params.cache_salt:
        prompt["cache_salt"] = params.cache_salt
    inputs = [ClientInput(port="media", payload=payload)] if payload is not None else []
    if "audio" not in outputs:
        return RequestPlan(stages=("thinker",), params={"thinker": prompt}, inputs=inputs, outputs=outputs)
    return RequestPlan(
        stages=("thinker", "talker", "code2wav"),
        params={"thinker": prompt, "talker": {"voice": request.voice} if request.voice is not None else {}},
        inputs=inputs,
        outputs=(*outputs, "codes") if params.return_codes else outputs,
    )


def variant_for(path: str) -> str:
    """The variant that a checkpoint folder can run."""
    return "default" if has_talker(path) else TEXT_ONLY


PIPELINE = PipelineConfig(
    name="qwen3_omni",
    variants={
        "default": Variant(stages=(THINKER, TALKER, CODE2WAV), edges=(*_TEXT_EDGES, *_SPEECH_EDGES)),
        TEXT_ONLY: Variant(stages=(THINKER_ALONE,), edges=_TEXT_EDGES),
    },
    plan=plan,
    tasks=("chat",),
    voices=VOICES,
    architectures=("Qwen3OmniMoeForConditionalGeneration",),
    sample_rate=SAMPLE_RATE,
    description="Qwen3-Omni hears, sees, reads, writes and speaks; speech streams while the text is written",
    variant_for=variant_for,
    footprint=footprint,
)
