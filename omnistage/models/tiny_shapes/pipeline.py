"""tiny-shapes as a built-in pipeline. Torch-free.

Variant `default` is one diffusion stage, `painter`, that reads words. In the variant `thinker` a language model
(SmolLM2-135M) reads the caption, and its hidden states condition the painter.
"""

from __future__ import annotations

import msgspec

from omnistage.config.model import (
    ClientInput,
    EdgeSpec,
    OmniConfig,
    PipelineConfig,
    RequestPlan,
    StageSpec,
    Variant,
)
from omnistage.errors import RequestError
from omnistage.models.tiny_shapes.captions import caption, read_prompt
from omnistage.models.tiny_shapes.footprint import footprint
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from omnistage.stages.diffusion.model import BATCHING
from omnistage.stages.diffusion.step_caching import STEP_CACHE

_MODALITIES = ("image", "progress", "partial", "latents")

PAINTER = StageSpec(
    name="painter",
    kind="diffusion",
    component="omnistage.models.tiny_shapes.stage:painter",
    inputs={"text": "text"},
    outputs={name: name for name in _MODALITIES},
    options={"batching": BATCHING} | STEP_CACHE,
    defaults={"max_num_seqs": 32, "token_budget": 1 << 14, "arena_mb": 8},
    capabilities=frozenset({"image", "seed", "step_batching", "request_batching", "partial_images", "step_cache"}),
)
THINKER = StageSpec(
    name="thinker",
    kind="ar",
    component="omnistage.models.tiny_shapes.thinker:create",
    outputs={"hidden": "hidden"},
    # Nothing of what it would say is used.
    sampling={"temperature": 0.0, "max_tokens": 1},
    defaults={"kv_memory_mb": 32, "arena_mb": 4},
)
READER = msgspec.structs.replace(
    PAINTER,
    component="omnistage.models.tiny_shapes.stage:hidden_painter",
    inputs={"text": "text", "hidden": "hidden"},
)
_EDGES = (
    EdgeSpec("client.text", "painter.text"),
    *(EdgeSpec(f"painter.{name}", f"client.{name}") for name in _MODALITIES),
)


def plan(request: OmniRequest, media: dict[str, MultimodalPayload], config: OmniConfig) -> RequestPlan:
    """The picture of a prompt; modalities also take "progress" and "partial" (streamed) and "latents"."""
    if media:
        raise RequestError("tiny-shapes takes text only", param=sorted(media)[0])
    if request.voice is not None:
        raise RequestError("tiny-shapes takes no voice", param="voice")
    prompt = caption(read_prompt(_prompt(request)))
    wanted = tuple(request.modalities or ("image",))
    unknown = sorted(set(wanted) - set(_MODALITIES))
    if unknown:
        raise RequestError(
            f"no modality {unknown[0]!r}; tiny-shapes gives {', '.join(_MODALITIES)}", param="modalities"
        )
    params = dict(request.params)
    latents = ("latents",) if params.pop("return_latents", False) else ()
    thinks = config.variant == "thinker"
    return RequestPlan(
        stages=("thinker", "painter") if thinks else ("painter",),
        params={"painter": params} | ({"thinker": {"raw_prompt": prompt}} if thinks else {}),
        inputs=[ClientInput(port="text", payload=MultimodalPayload.text(prompt))],
        outputs=tuple(dict.fromkeys((*wanted, *latents))),
    )


def _prompt(request: OmniRequest) -> str:
    given = [text for text in (request.prompt, request.raw_prompt) if text is not None]
    if request.messages is not None:
        given.append(_text_of(request))
    if len(given) != 1:
        raise RequestError("give one of prompt, raw_prompt and messages", param="prompt")
    return given[0]


def _text_of(request: OmniRequest) -> str:
    """The last user message of a conversation, if it is text."""
    users = [message for message in request.messages or [] if message.get("role") == "user"]
    content = users[-1].get("content") if users else None
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = " ".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise RequestError("tiny-shapes takes a user message of text", param="messages")
    return content


PIPELINE = PipelineConfig(
    name="tiny-shapes",
    variants={
        "default": Variant(stages=(PAINTER,), edges=_EDGES),
        "thinker": Variant(stages=(THINKER, READER), edges=(*_EDGES, EdgeSpec("thinker.hidden", "painter.hidden"))),
    },
    plan=plan,
    tasks=("image", "chat"),
    default_model="tiny-shapes",
    description="a 1.8 M-parameter diffusion transformer that draws one coloured shape; its weights are built in",
    footprint=footprint,
)
