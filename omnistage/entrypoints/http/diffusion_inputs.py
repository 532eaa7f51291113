"""Client fields of the media routes -> engine requests: parameters by the model's names, pictures, videos, sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from omnistage.entrypoints.http.inputs import MediaItem, check_chars, sampling_of
from omnistage.entrypoints.http.media_schema import DiffusionFields, VideoRequest
from omnistage.entrypoints.http.state import ServerState
from omnistage.errors import RequestError
from omnistage.media.jobs import DecodeJob, MediaKind
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest

_BY_NAME = (
    "size", "height", "width", "num_inference_steps", "guidance_scale", "flow_shift", "negative_prompt", "num_frames",
    "fps", "bot_task", "use_system_prompt", "action",
)  # fmt: skip
_MEDIA: dict[str, MediaKind] = {"image": "image", "last_image": "image", "video": "video", "audio": "audio"}
DEFAULT_FPS = 24.0


class Ask(msgspec.Struct, frozen=True):
    """An engine request without its media, and the media still encoded."""

    request: OmniRequest
    items: list[MediaItem]


def ask_of(
    state: ServerState,
    body: DiffusionFields,
    request_id: str,
    task: str,
    modalities: tuple[str, ...] | None = None,
    *,
    stream: bool = False,
) -> Ask:
    """Raises RequestError naming the field at fault. `modalities` None takes all that the model makes of it."""
    state.check_model(body.model)
    state.check_task(task)
    check_chars(len(body.prompt), state.limits, "prompt")
    given = msgspec.structs.asdict(body)
    params = {name: given[name] for name in _BY_NAME if given.get(name) is not None}
    for name, value in body.params.items():
        if name in params or name in _MEDIA:
            raise RequestError(f"params.{name}: give it as a field of its own", param=f"params.{name}")
        params[name] = value
    if isinstance(body, VideoRequest):
        _length(body, params)
    items: list[MediaItem] = []
    for name, kind in _MEDIA.items():
        if given.get(name) is not None:
            params[name] = {"media": _item(items, kind, given[name], name)}
    if isinstance(params.get("action"), dict):
        params["action"] = _action(items, params["action"])
    if given.get("references") is not None:
        params["references"] = [_reference(items, index, item) for index, item in enumerate(given["references"])]
    request = OmniRequest(
        id=request_id,
        task=task,
        prompt=body.prompt,
        modalities=modalities,
        sampling=sampling_of(state, body),
        seed=body.seed,
        priority=body.priority,
        timeout=body.timeout,
        stream=stream,
        progress=stream and task == "video",
        params=params,
    )
    return Ask(request, items)


def _length(body: VideoRequest, params: dict[str, Any]) -> None:
    """`seconds` as frames, at `fps` or the usual 24 a second."""
    if body.seconds is None:
        return
    if body.num_frames is not None:
        raise RequestError("seconds and num_frames both give the length; give one", param="seconds")
    params["num_frames"] = max(1, round(body.seconds * (body.fps or DEFAULT_FPS)))


def _item(items: list[MediaItem], kind: MediaKind, source: str, param: str) -> str:
    item = MediaItem(f"{kind}{len(items)}", kind, source, True, param)
    items.append(item)
    return item.key


def _reference(items: list[MediaItem], index: int, reference: Mapping[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for name, value in reference.items():
        param = f"references[{index}].{name}"
        if name not in _MEDIA:
            read[name] = value
        elif isinstance(value, str):
            read[name] = {"media": _item(items, _MEDIA[name], value, param)}
        else:
            raise RequestError(f"{param}: a data URL was expected", param=param)
    return read


def _action(items: list[MediaItem], action: Mapping[str, Any]) -> dict[str, Any]:
    """The action parameter with what the robot sees as media."""
    read = dict(action)
    for name in ("image", "video"):
        if isinstance(read.get(name), str):
            read[name] = {"media": _item(items, _MEDIA[name], read[name], f"action.{name}")}
    return read


async def picture(state: ServerState, data: bytes, param: str) -> MultimodalPayload:
    """An uploaded picture as the engine takes it."""
    return await state.decode(DecodeJob(kind="image", limits=state.limits, param=param), data)
