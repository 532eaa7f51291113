"""Text in, text out: one AR stage around any Llama-like causal language model. Torch-free."""

from __future__ import annotations

from typing import Any

from omnistage.config.model import EdgeSpec, OmniConfig, PipelineConfig, RequestPlan, StageSpec, TextMarkup, Variant
from omnistage.errors import RequestError
from omnistage.models.causal_lm.footprint import footprint
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest

THINKER = StageSpec(
    name="thinker",
    kind="ar",
    component="omnistage.models.causal_lm.stage:create",
    inputs={"prompt": "text"},
    outputs={"text": "text"},
    objective="ttft",
    capabilities=frozenset({"text", "logprobs", "seed", "int4", "weight_layout", "structured"}),
    markup=TextMarkup(tool_format="hermes", reasoning=("<think>", "</think>")),
)
_TEXT_PARTS = ("text", "input_text")
_PARAMS = frozenset({"prompt_token_ids", "cache_salt"})


def plan(request: OmniRequest, media: dict[str, MultimodalPayload], config: OmniConfig) -> RequestPlan:
    """Every request is the thinker's. Raises RequestError for media, voices and parameters that it has no use for."""
    if media:
        raise RequestError("the model takes text only", param="messages")
    if request.voice is not None:
        raise RequestError("the model does not speak", param="voice")
    if request.modalities not in (None, ("text",)):
        raise RequestError("the model gives text only", param="modalities")
    unknown = request.params.keys() - _PARAMS
    if unknown:
        raise RequestError(f"unknown parameter {min(unknown)!r}", param=min(unknown))
    return RequestPlan(stages=("thinker",), params={"thinker": _prompt(request)}, outputs=("text",))


def _prompt(request: OmniRequest) -> dict[str, Any]:
    extra = {"cache_salt": request.params["cache_salt"]} if "cache_salt" in request.params else {}
    if "prompt_token_ids" in request.params:
        return extra | {"token_ids": request.params["prompt_token_ids"]}
    if request.raw_prompt is not None:
        return extra | {"raw_prompt": request.raw_prompt}
    if request.task == "completion":
        return extra | {"raw_prompt": request.prompt or ""}
    if request.messages is not None:
        return extra | {"messages": [_text_message(message) for message in request.messages]}
    if request.prompt is not None:
        return extra | {"messages": [{"role": "user", "content": request.prompt}]}
    raise RequestError("give messages or a prompt", param="messages")


def _text_message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for part in content:
        if part.get("type") not in _TEXT_PARTS:
            raise RequestError(f"content parts of type {part.get('type')!r} are not supported", param="messages")
    return {**message, "content": "".join(str(part.get("text", "")) for part in content)}


PIPELINE = PipelineConfig(
    name="causal-lm",
    variants={
        "default": Variant(
            stages=(THINKER,),
            edges=(EdgeSpec("client.prompt", "thinker.prompt"), EdgeSpec("thinker.text", "client.text")),
        )
    },
    plan=plan,
    tasks=("chat", "completion"),
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    description="any Llama-like language model from a folder or a GGUF file: text in, text out",
    footprint=footprint,
)
