"""Questions to the reasoner alone: messages with pictures in, text out. Torch-free."""

from __future__ import annotations

from typing import Any

from omnistage.config.model import ClientInput, RequestPlan
from omnistage.errors import RequestError
from omnistage.payload import MultimodalPayload, Tensor
from omnistage.request import OmniRequest

STAGE = "reasoner"
_TEXT = ("text", "input_text")
_DIMENSIONS = {"image": 3, "video": 4}
# What the template writes where a medium stands: nobody may write it as text.
_PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def plan_answer(request: OmniRequest, media: dict[str, MultimodalPayload]) -> RequestPlan:
    """The reasoner answers a prompt or a conversation. Raises RequestError naming the field."""
    if request.modalities not in (None, ("text",)):
        raise RequestError("the reasoner gives text only", param="modalities")
    unknown = sorted(request.params.keys() - {"cache_salt"})
    if unknown:
        raise RequestError(f"unknown parameter {unknown[0]!r}", param=unknown[0])
    params = dict(request.params)
    collected = _Collected(media)
    if request.raw_prompt is not None:
        params["raw_prompt"] = _clean(request.raw_prompt, "raw_prompt")
    elif request.prompt is not None or request.messages is not None:
        params["messages"] = collected.messages(request.messages or [{"role": "user", "content": request.prompt}])
    else:
        raise RequestError("give messages or a prompt", param="messages")
    inputs = [ClientInput(port="media", payload=collected.payload)] if collected.payload.tensors else []
    return RequestPlan(stages=(STAGE,), params={STAGE: params}, inputs=inputs, outputs=("text",))


class _Collected:
    """Media in the order in which the messages name them: tensor "0", "1", ... with `meta["kinds"]` and `["fps"]`."""

    def __init__(self, media: dict[str, MultimodalPayload]) -> None:
        self._media = media
        self.payload = MultimodalPayload({}, {"kinds": [], "fps": []})

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**message, "content": self._content(message.get("content"))} for message in messages]

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return _clean(content, "messages")
        if not isinstance(content, list):
            raise RequestError("a message's content is a string or a list of parts", param="messages")
        return [self._part(part) for part in content]

    def _part(self, part: dict[str, Any]) -> dict[str, Any]:
        kind = part.get("type")
        if kind in _TEXT:
            return {"type": "text", "text": _clean(str(part.get("text", "")), "messages")}
        if kind not in _DIMENSIONS:
            raise RequestError(f"content parts of type {kind!r} are not supported", param="messages")
        payload = self._media.get(str(part.get("media")))
        tensor = payload.tensors.get(kind) if payload is not None else None
        if payload is None or tensor is None or not _fits(tensor, _DIMENSIONS[kind]):
            raise RequestError(f"a part of type {kind} has no {kind}", param="messages")
        self.payload.tensors[str(len(self.payload.tensors))] = tensor
        self.payload.meta["kinds"].append(kind)
        self.payload.meta["fps"].append(float(payload.meta.get("fps") or 0.0))
        return {"type": kind}


def _fits(tensor: Tensor, dimensions: int) -> bool:
    return tensor.dtype == "uint8" and len(tensor.shape) == dimensions and tensor.shape[-1] == 3 and tensor.nbytes > 0


def _clean(text: str, param: str) -> str:
    for placeholder in _PLACEHOLDERS:
        if placeholder in text:
            raise RequestError(f"{param}: {placeholder} stands for a medium and cannot be written", param=param)
    return text
