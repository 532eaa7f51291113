"""From a client's request to parameters, media ports and wanted outputs. Torch-free."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from omnistage.config.model import ClientInput
from omnistage.errors import RequestError
from omnistage.models.cosmos3.ask import START, Ask
from omnistage.models.cosmos3.transfer_plan import HINTS
from omnistage.payload import Array, MultimodalPayload
from omnistage.request import OmniRequest

LATENTS = ("latents", "sound_latents", "action_latents")
MEDIA_PORTS = (
    "image",
    "video",
    "actions",
    *(f"control_{hint}" for hint in HINTS),
    *(f"{START}{name}" for name in LATENTS),
)
OUTPUTS = ("image", "video", "audio", "action", "latents", "audio_latents", "progress", "partial")


class Reading(NamedTuple):
    """`params` as the stages resolve them; `latents`: the final latents are wanted too."""

    params: dict[str, Any]
    inputs: list[ClientInput]
    latents: bool


def read_request(request: OmniRequest, media: dict[str, MultimodalPayload]) -> Reading:
    """Raises RequestError for a missing prompt and for media of a wrong kind or shape, naming the parameter."""
    params = dict(request.params)
    latents = params.pop("return_latents", False)
    reader = _Media(media)
    for name in ("image", "video"):
        if name in params:
            reader.take(name, params.pop(name), name)
    for name in LATENTS:
        if name in params:
            reader.take(START + name, params.pop(name), name)
    if "control_videos" in params:
        reader.controls(params.pop("control_videos"))
    if isinstance(params.get("action"), dict):
        params["action"] = reader.action(params["action"])
    params["prompt"] = _prompt(request)
    params["media_shapes"] = {item.port: _array(item).shape for item in reader.inputs}
    return Reading(params, reader.inputs, latents is True)


def as_image(request: OmniRequest) -> OmniRequest:
    """A request for a picture: one frame. Raises RequestError when it asks for more."""
    if request.params.get("num_frames", 1) != 1:
        raise RequestError("a picture has num_frames 1", param="num_frames")
    return msgspec.structs.replace(request, params=request.params | {"num_frames": 1})


def outputs_of(request: OmniRequest, ask: Ask, latents: bool) -> tuple[str, ...]:
    """The client ports of this request. Raises RequestError for a modality that it does not make."""
    made = ["image" if ask.is_image else "video"]
    if ask.sound_latents:
        made.append("audio")
    if ask.action is not None and ask.action.mode != "forward_dynamics":
        made.append("action")
    extra = ["latents"] + ["audio_latents"] * bool(ask.sound_latents)
    shown = ["progress"] + ["partial"] * ask.is_image
    wanted = list(request.modalities) if request.modalities is not None else made
    for name in wanted:
        if name not in (*made, *extra, *shown):
            raise RequestError(f"this request makes {', '.join(made)}, no {name}", param="modalities")
    return tuple(dict.fromkeys((*wanted, *(extra if latents else []))))


def _prompt(request: OmniRequest) -> str:
    given = request.prompt if request.prompt is not None else request.raw_prompt
    if given is not None:
        return given
    for message in reversed(request.messages or []):
        if message.get("role") == "user":
            return _text_of(message.get("content", ""))
    raise RequestError("prompt is required", param="prompt")


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if any(part.get("type") not in ("text", "input_text") for part in parts):
        raise RequestError("messages take text only here; give media as image, video or action", param="messages")
    return "".join(str(part.get("text", "")) for part in parts)


class _Media:
    """Collects the media of a request as port inputs."""

    def __init__(self, media: dict[str, MultimodalPayload]) -> None:
        self._media = media
        self.inputs: list[ClientInput] = []

    def take(self, port: str, reference: Any, param: str) -> None:
        key = reference.get("media") if isinstance(reference, dict) else None
        if key not in self._media:
            raise RequestError(f"{param}: a medium was expected", param=param)
        (tensor,) = self._media[key].tensors.values()
        self._put(port, tensor.array, param)

    def controls(self, videos: Any) -> None:
        if not isinstance(videos, dict) or not videos:
            raise RequestError(f"control_videos maps {', '.join(HINTS)} to videos", param="control_videos")
        for hint, reference in videos.items():
            if hint not in HINTS:
                raise RequestError(f"control_videos: {hint!r} is not one of {', '.join(HINTS)}", param="control_videos")
            self.take(f"control_{hint}", reference, "control_videos")

    def action(self, action: dict[str, Any]) -> dict[str, Any]:
        """The parameter without its media."""
        rest = dict(action)
        for name in ("image", "video"):
            if rest.get(name) is not None:
                self.take(name, rest.pop(name), "action")
        given = rest.pop("raw_actions", None)
        if isinstance(given, dict):
            self.take("actions", given, "action")
        elif given is not None:
            try:
                self._put("actions", np.asarray(given, np.float32), "action")
            except (ValueError, TypeError):
                raise RequestError("action.raw_actions must be rows of numbers", param="action") from None
        return rest

    def _put(self, port: str, array: Array, param: str) -> None:
        pixels = array.dtype == np.uint8 and array.ndim in (3, 4) and array.shape[-1] == 3
        if port.startswith(START):
            ok, want = array.dtype.kind == "f", "float latents"
            array = array.astype(np.float32)
        elif port == "actions":
            ok, want = array.ndim == 2 and array.dtype.kind == "f", "float [steps, width]"
        elif port == "image":
            ok, want = pixels and (array.ndim == 3 or len(array) == 1), "one picture, uint8 [H, W, 3]"
        else:
            ok, want = pixels and array.ndim == 4, "uint8 [T, H, W, 3]"
        if not ok or array.size == 0:
            raise RequestError(f"{param}: {want} was expected, not {array.dtype} {list(array.shape)}", param=param)
        self.inputs.append(ClientInput(port=port, payload=MultimodalPayload.of({}, **{port: array})))


def _array(item: ClientInput) -> Array:
    return item.payload[item.port]
