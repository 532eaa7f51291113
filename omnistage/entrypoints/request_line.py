"""One line of a requests file (or a mapping from Python) as an `OmniRequest` with its media read from local files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from omnistage.config.model import LimitsConfig
from omnistage.errors import RequestError
from omnistage.media.audio_decode import decode_audio
from omnistage.media.data_url import decode_base64, decode_data_url
from omnistage.media.image import decode_image
from omnistage.media.video_payload import video_payload
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest

_FIELDS = frozenset(field.name for field in msgspec.structs.fields(OmniRequest)) - {"params"}
# Content part types of OpenAI and of the multimodal models, by the medium they hold.
_PART_MEDIA = {
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "video_url": "video",
    "video": "video",
}
# The media of an `action` parameter; given as numbers instead of a file, actions stay in place.
_ACTION_MEDIA = {"image": "image", "video": "video", "raw_actions": "action"}

# Parameters of diffusion models that bring latents to start from.
_LATENTS = ("latents", "sound_latents", "audio_latents", "action_latents")


class Line(NamedTuple):
    request: OmniRequest
    media: dict[str, MultimodalPayload]


def parse_line(fields: Mapping[str, Any], limits: LimitsConfig, root: Path | None = None) -> Line:
    """Splits known fields from model parameters and loads media. Raises RequestError naming the field.

    Relative media paths are below `root` (the folder of the requests file; default: the current folder).
    """
    options = fields.get("mm_processor_kwargs")
    hears_videos = isinstance(options, Mapping) and options.get("use_audio_in_video") is True
    reader = _MediaReader(limits, root or Path(), hears_videos=hears_videos)
    known = {key: value for key, value in fields.items() if key in _FIELDS}
    params = {key: value for key, value in fields.items() if key not in _FIELDS}
    if isinstance(known.get("messages"), list):
        known["messages"] = [reader.message(message) for message in known["messages"]]
    if isinstance(known.get("modalities"), list):
        known["modalities"] = tuple(known["modalities"])
    for key in ("image", "last_image", "video", "audio"):
        if isinstance(params.get(key), (str, Path)):
            params[key] = {"media": reader.add(key, params[key], key)}
    for key in _LATENTS:
        if isinstance(params.get(key), (str, Path)):
            params[key] = {"media": reader.add("latents", params[key], key)}
    if isinstance(params.get("images"), list):
        params["images"] = [reader.picture(item) for item in params["images"]]
    if isinstance(params.get("references"), list):
        params["references"] = [reader.reference(item) for item in params["references"]]
    if isinstance(params.get("action"), Mapping):
        params["action"] = reader.nested("action", params["action"], _ACTION_MEDIA)
    if isinstance(params.get("control_videos"), Mapping):
        videos = params["control_videos"]
        params["control_videos"] = reader.nested("control_videos", videos, dict.fromkeys(videos, "video"))
    try:
        request = msgspec.convert(known | {"params": params}, OmniRequest)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param=_path_of(str(error))) from None
    return Line(request, reader.media)


def _path_of(message: str) -> str | None:
    _, at, path = message.rpartition("`$.")
    return path.rstrip("`") if at else None


class _MediaReader:
    def __init__(self, limits: LimitsConfig, root: Path, *, hears_videos: bool = False) -> None:
        self._hears_videos = hears_videos
        self._limits = limits
        self._root = root
        self.media: dict[str, MultimodalPayload] = {}

    def message(self, message: Any) -> Any:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
            return message
        return {**message, "content": [self._part(part) for part in message["content"]]}

    def _part(self, part: Any) -> Any:
        kind = _PART_MEDIA.get(str(part.get("type"))) if isinstance(part, Mapping) else None
        if kind is None or "media" in part:
            return part
        source = part.get(part["type"], part.get("url"))
        if isinstance(source, Mapping) and "data" in source:
            data = decode_base64(str(source["data"]), self._limits.max_body_mb << 20, "messages")
            return {"type": kind, "media": self._put(kind, self._decode(kind, data, "messages"))}
        if isinstance(source, Mapping):
            source = source.get("url")
        return {"type": kind, "media": self.add(kind, source, "messages")}

    def picture(self, item: Any) -> Any:
        """An entry of `images`: a path or URL, bare or under "image"."""
        source = item.get("image") if isinstance(item, Mapping) and "media" not in item else item
        return {"media": self.add("image", source, "images")} if isinstance(source, (str, Path)) else item

    def reference(self, item: Any) -> Any:
        if not isinstance(item, Mapping):
            raise RequestError("each reference is a mapping with image, video or audio", param="references")
        return {
            key: {"media": self.add(key, value, "references")} if key in ("image", "video", "audio") else value
            for key, value in item.items()
        }

    def nested(self, param: str, fields: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
        """The fields of a parameter with the files among them loaded; `kinds` maps field names to media kinds."""
        return {
            key: {"media": self.add(kinds[key], value, param)}
            if key in kinds and isinstance(value, (str, Path))
            else value
            for key, value in fields.items()
        }

    def add(self, kind: str, source: Any, param: str) -> str:
        """Loads a medium from a path, a file URL or a data URL; returns its key in `media`."""
        kind = "image" if kind == "last_image" else kind
        if not isinstance(source, (str, Path)):
            raise RequestError(f"{param}: a path or a data URL was expected", param=param)
        text = str(source)
        if kind == "latents" and not text.endswith(".npy"):
            raise RequestError(f"{param}: latents are a .npy file", param=param)
        if text.startswith("data:"):
            data = decode_data_url(text, self._limits.max_body_mb << 20, param)
            return self._put(kind, self._decode(kind, data, param))
        if "://" in text and not text.startswith("file://"):
            raise RequestError(f"{param}: remote media are not fetched; give a local path or a data URL", param=param)
        file = self._root / Path(text.removeprefix("file://")).expanduser()
        if file.suffix == ".npy":
            return self._put(kind, _array_payload(kind, file, param))
        if kind == "action":
            raise RequestError(f"{param}: actions are numbers or a .npy file, not {file.name}", param=param)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise RequestError(f"{param}: cannot read {file.name}: {error.strerror}", param=param) from None
        return self._put(kind, self._decode(kind, data, param))

    def _put(self, kind: str, payload: MultimodalPayload) -> str:
        key = f"{kind}{len(self.media)}"
        self.media[key] = payload
        return key

    def _decode(self, kind: str, data: bytes, param: str) -> MultimodalPayload:
        limits = self._limits
        if kind == "audio":
            audio = decode_audio(data, limits.max_audio_s, param)
            return MultimodalPayload.of({"sample_rate": audio.rate}, audio=audio.samples)
        if kind == "image":
            return MultimodalPayload.of(image=decode_image(data, limits.max_image_pixels, param))
        return video_payload(data, limits, param, with_sound=self._hears_videos)


def _array_payload(kind: str, file: Path, param: str) -> MultimodalPayload:
    try:
        array = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise RequestError(f"{param}: cannot read {file.name}: {error}", param=param) from None
    return MultimodalPayload.of({}, **{kind: array})
