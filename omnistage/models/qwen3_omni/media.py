"""The media of a conversation as one payload for the thinker. Torch-free.

Tensors are named by their number; `meta["items"]` describes them in the order in which the model meets them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from omnistage.errors import RequestError
from omnistage.models.qwen3_omni.request import ProcessorArgs
from omnistage.payload import MultimodalPayload, Tensor

_LAYOUTS = {
    "audio": (2, "float32 [channels, samples]"),
    "image": (3, "uint8 [H, W, 3]"),
    "video": (4, "uint8 [T, H, W, 3]"),
}


class MediaItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One medium. `rate` is samples (audio, Hz) or frames (video) per second, 0 for bare frames; `sounds` is the
    number among the videos of the one whose sound this audio is."""

    kind: str
    rate: float = 0.0
    sounds: int | None = None


class MediaSet(msgspec.Struct, frozen=True):
    """`meta` of the payload: `fps` is the rate at which videos are looked at."""

    items: list[MediaItem]
    fps: float


def collect_media(
    messages: list[dict[str, Any]], media: dict[str, MultimodalPayload], args: ProcessorArgs
) -> tuple[list[dict[str, Any]], MultimodalPayload | None]:
    """Messages for the chat template (media parts keep their type only) and the payload, None without media.

    Raises RequestError for media that are missing, of another kind than their part, or videos without sound where
    sound is asked for.
    """
    collector = _Collector(media, args)
    shown = [{**message, "content": collector.content(message["content"])} for message in messages]
    return shown, collector.payload()


class _Collector:
    def __init__(self, media: dict[str, MultimodalPayload], args: ProcessorArgs) -> None:
        self._media = media
        self._args = args
        self._items: list[MediaItem] = []
        self._tensors: dict[str, Tensor] = {}
        self._videos = 0

    def payload(self) -> MultimodalPayload | None:
        if not self._items:
            return None
        timed = any(item.kind == "video" and item.rate for item in self._items)
        fps = self._args.fps or (2.0 if timed else 1.0)
        return MultimodalPayload(self._tensors, msgspec.to_builtins(MediaSet(self._items, fps)))

    def content(self, content: Any) -> Any:
        if isinstance(content, str):
            return content
        sounds = deque(part for part in content if part["type"] == "audio")
        shown: list[dict[str, Any]] = []
        taken: list[dict[str, Any]] = []
        for part in content:
            if part["type"] == "text":
                shown.append({"type": "text", "text": part["text"]})
            elif not any(part is sound for sound in taken):
                shown.append({"type": part["type"]})
                taken += self._add(part, sounds)
        return shown

    def _add(self, part: dict[str, Any], sounds: deque[dict[str, Any]]) -> list[dict[str, Any]]:
        """Notes a part; the audio part that was used up as a video's sound."""
        kind, payload = part["type"], self._find(part)
        if kind == "audio":
            self._put(MediaItem("audio", _rate(payload)), payload.tensors["audio"])
            if sounds and sounds[0] is part:
                sounds.popleft()
            return []
        rate = float(payload.meta.get("fps") or 0.0)
        self._put(MediaItem(kind, rate if kind == "video" else 0.0), payload.tensors[kind])
        return self._sound_of(payload, sounds) if kind == "video" else []

    def _sound_of(self, video: MultimodalPayload, sounds: deque[dict[str, Any]]) -> list[dict[str, Any]]:
        number, self._videos = self._videos, self._videos + 1
        if not self._args.use_audio_in_video:
            return []
        if "audio" in video.tensors:
            self._put(MediaItem("audio", _rate(video), number), video.tensors["audio"])
            return []
        if not sounds:
            raise RequestError(
                "use_audio_in_video: a video has no sound; give its sound as an audio part of the same message",
                param="mm_processor_kwargs",
            )
        part = sounds.popleft()
        payload = self._find(part)
        self._put(MediaItem("audio", _rate(payload), number), payload.tensors["audio"])
        return [part]

    def _find(self, part: dict[str, Any]) -> MultimodalPayload:
        kind = part["type"]
        payload = self._media.get(part["media"])
        if payload is None:
            raise RequestError(f"a message names {part['media']!r}, which the request does not hold", param="messages")
        dims, layout = _LAYOUTS[kind]
        tensor = payload.tensors.get(kind)
        dtype = layout.partition(" ")[0]
        if tensor is None or tensor.dtype != dtype or len(tensor.shape) != dims or not tensor.nbytes:
            raise RequestError(f"{part['media']!r} is no {kind}: {layout} was expected", param="messages")
        return payload

    def _put(self, item: MediaItem, tensor: Tensor) -> None:
        self._tensors[str(len(self._items))] = tensor
        self._items.append(item)


def _rate(payload: MultimodalPayload) -> float:
    rate = payload.meta.get("sample_rate")
    if not isinstance(rate, int | float) or rate <= 0:
        raise RequestError("audio needs its sample rate", param="messages")
    return float(rate)
