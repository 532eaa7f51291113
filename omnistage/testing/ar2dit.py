"""ar2dit: an AR stage that hands keys, values and hidden rows to toydit; the picture depends on every row."""

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
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from omnistage.testing.ar2dit_stages import PORT
from omnistage.testing.toydit import DELAY, MODALITIES, STAGE, read_request

_THINKER = StageSpec(
    name="thinker",
    kind="ar",
    component="omnistage.testing.ar2dit_stages:thinker",
    inputs={"text": "text"},
    outputs={"text": "text", PORT: "rows"},
    options={"step_delay_s": DELAY},
    defaults={"kv_memory_mb": 1, "max_num_seqs": 64, "arena_mb": 4},
    objective="ttft",
    torch=False,
)
_DIT = msgspec.structs.replace(STAGE, component="omnistage.testing.ar2dit_stages:dit", inputs={PORT: "rows"})


def plan(request: OmniRequest, media: dict[str, MultimodalPayload], config: OmniConfig) -> RequestPlan:
    """The picture of all rows of the prompt and of the answer, which repeats the prompt as far as max_tokens goes; the
    modality "text" gives the answer too."""
    asked = tuple(request.modalities or ("image",))
    drawn = tuple(name for name in asked if name != "text") or ("image",)
    prompt, params, outputs = read_request(msgspec.structs.replace(request, modalities=drawn), media)
    told = ("text",) if "text" in asked else ()
    text = ClientInput(port="text", payload=MultimodalPayload.text(prompt))
    return RequestPlan(stages=("thinker", "dit"), params={"dit": params}, inputs=[text], outputs=(*told, *outputs))


PIPELINE = PipelineConfig(
    name="ar2dit",
    variants={
        "default": Variant(
            stages=(_THINKER, _DIT),
            edges=(
                EdgeSpec("client.text", "thinker.text"),
                EdgeSpec(f"thinker.{PORT}", f"dit.{PORT}"),
                EdgeSpec("thinker.text", "client.text"),
                *(EdgeSpec(f"dit.{name}", f"client.{name}") for name in MODALITIES),
            ),
        )
    },
    plan=plan,
    tasks=("image", "chat"),
    description="closed-form test pipeline: an AR stage whose every key, value and hidden row shapes toydit's picture",
)
