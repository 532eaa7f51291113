"""One line of a requests file (or a mapping from Python) as an `OmniRequest` with its media read from local files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from omnistage.config.model import LimitsConfig
from omnistage.errors import RequestError, field_of
from omnistage.media.data_url import decode_base64, decode_data_url
from omnistage.media.jobs import DecodeJob, MediaKind, decode
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

# Parameters that are one medium; latents are what diffusion models start from.
_PARAMETER_MEDIA = {"image": "image", "last_image": "image", "video": "video", "audio": "audio"} | dict.fromkeys(
    ("latents", "sound_latents", "audio_latents", "action_latents"), "latents"
)


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
    read = {key: reader.parameter(key, value) for key, value in params.items()}
    try:
        request = msgspec.convert(known | {"params": read}, OmniRequest)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param=field_of(error)) from None
    return Line(request, reader.media)


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

    def parameter(self, key: str, value: Any) -> Any:
        """A model parameter with the files that it names loaded."""
        if key in _PARAMETER_MEDIA and isinstance(value, (str, Path)):
            return {"media": self.add(_PARAMETER_MEDIA[key], value, key)}
        if key in ("images", "references") and isinstance(value, list):
            return [self._picture(item) if key == "images" else self._reference(item) for item in value]
        if key == "action" and isinstance(value, Mapping):
            return self._nested(key, value, _ACTION_MEDIA)
        if key == "control_videos" and isinstance(value, Mapping):
            return self._nested(key, value, dict.fromkeys(value, "video"))
        return value

    def _picture(self, item: Any) -> Any:
        """An entry of `images`: a path or URL, bare or under "image"."""
        source = item.get("image") if isinstance(item, Mapping) and "media" not in item else item
        return {"media": self.add("image", source, "images")} if isinstance(source, (str, Path)) else item

    def _reference(self, item: Any) -> Any:
        if not isinstance(item, Mapping):
            raise RequestError("each reference is a mapping with image, video or audio", param="references")
        return {
            key: {"media": self.add(key, value, "references")} if key in ("image", "video", "audio") else value
            for key, value in item.items()
        }

    def _nested(self, param: str, fields: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
        """The fields of a parameter with the files among them loaded; `kinds` maps field names to media kinds."""
        return {
            key: {"media": self.add(kinds[key], value, param)}
            if key in kinds and isinstance(value, (str, Path))
            else value
            for key, value in fields.items()
        }

    def add(self, kind: str, source: Any, param: str) -> str:
        """Loads a medium from a path, a file URL or a data URL; returns its key in `media`."""
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
        read: MediaKind = "audio" if kind == "audio" else "image" if kind == "image" else "video"
        job = DecodeJob(kind=read, limits=self._limits, param=param, with_sound=self._hears_videos)
        return decode(job, data)


def _array_payload(kind: str, file: Path, param: str) -> MultimodalPayload:
    try:
        array = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise RequestError(f"{param}: cannot read {file.name}: {error}", param=param) from None
    return MultimodalPayload.of({}, **{kind: array})
