"""The items of a conversation, as clients see them and as the engine takes them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from omnistage.entrypoints.http.audio_out import base64_text
from omnistage.entrypoints.http.events import Media
from omnistage.entrypoints.realtime.formats import OutputAudio, WireFormat
from omnistage.entrypoints.realtime.refusal import Refusal
from omnistage.errors import RequestError
from omnistage.media.samples import FloatAudio
from omnistage.payload import MultimodalPayload
from omnistage.tools import MadeCall

Role = Literal["user", "assistant", "system", "tool"]
Status = Literal["completed", "incomplete", "in_progress"]
MAX_ITEMS = 1024
ROOT = "root"


class Content(msgspec.Struct, kw_only=True):
    """One part. `text` is also the transcript of spoken parts (None: not known); audio is float32 [1, samples]."""

    type: str
    text: str | None = None
    audio: FloatAudio | None = None
    rate: int = 0
    image: MultimodalPayload | None = None
    spoken_ms: int = 0

    @property
    def empty(self) -> bool:
        return not self.text and self.audio is None and self.image is None

    def fields(self, fmt: WireFormat | None) -> dict[str, Any]:
        """As clients see it; the audio of the user comes only with `fmt`."""
        if not self.type.endswith("_audio"):
            return {"type": self.type} | ({} if self.text is None else {"text": self.text})
        shown: dict[str, Any] = {"type": self.type, "transcript": self.text}
        if fmt is not None and self.audio is not None:
            wire = OutputAudio(fmt)
            shown["audio"] = base64_text(wire.feed(self.audio, self.rate) + wire.finish())
        return shown


class Item(msgspec.Struct, kw_only=True):
    """A message, a function `call` of the assistant, or (role "tool") the `output` of the call whose id `call` has."""

    id: str
    role: Role
    content: list[Content] = []
    status: Status = "completed"
    call: MadeCall | None = None
    output: str = ""

    @property
    def audio_s(self) -> float:
        """Seconds of audio that the engine hears for this item."""
        return sum(int(part.audio.shape[1]) / part.rate for part in self.content if part.audio is not None)

    def fields(self, fmt: WireFormat | None = None) -> dict[str, Any]:
        shown: dict[str, Any] = {"id": self.id, "object": "realtime.item", "status": self.status}
        if self.call is None:
            content = [part.fields(fmt) for part in self.content]
            return shown | {"type": "message", "role": self.role, "content": content}
        shown["call_id"] = self.call.id
        if self.role == "tool":
            return shown | {"type": "function_call_output", "output": self.output}
        return shown | {"type": "function_call", "name": self.call.name, "arguments": self.call.arguments}

    def truncate(self, audio_end_ms: int) -> None:
        """Forgets what was not heard. Raises Refusal when the item is no spoken answer or shorter than that.

        Of a whole answer the transcript keeps the words up to the same share of its length; of one that was cut while
        it was made nothing is known, so the transcript goes.
        """
        part = self.content[0] if self.content else None
        if self.role != "assistant" or part is None or part.type != "output_audio" or self.status == "in_progress":
            raise Refusal("invalid_value", "only a finished spoken answer can be truncated", "item_id")
        if audio_end_ms > part.spoken_ms:
            message = f"audio_end_ms: the item has only {part.spoken_ms} ms of audio"
            raise Refusal("invalid_value", message, "audio_end_ms")
        if audio_end_ms == part.spoken_ms:
            return
        text = (part.text or "") if self.status == "completed" else ""
        share = len(text) * audio_end_ms // max(part.spoken_ms, 1)
        part.text, _, _ = text[:share].rpartition(" ")
        part.spoken_ms, self.status = audio_end_ms, "incomplete"


class Conversation:
    """Items in order."""

    def __init__(self) -> None:
        self.items = list[Item]()

    def find(self, item_id: str) -> Item:
        """Raises Refusal when there is none of that id."""
        for item in self.items:
            if item.id == item_id:
                return item
        raise Refusal("item_not_found", f"item_id: the conversation has no item {item_id!r}", "item_id")

    def insert(self, item: Item, after: str | None = None) -> str | None:
        """Puts an item behind another (default: at the end, ROOT: in front); returns the id of the one before it."""
        if len(self.items) >= MAX_ITEMS:
            raise Refusal("conversation_full", f"a conversation holds at most {MAX_ITEMS} items; delete some")
        if any(other.id == item.id for other in self.items):
            raise Refusal("invalid_value", f"item.id: {item.id!r} exists already", "item.id")
        if item.role == "tool" and item.call is not None and not self._has_call(item.call.id):
            raise Refusal("invalid_value", f"item.call_id: no call {item.call.id!r} was made", "item.call_id")
        index = len(self.items)
        if after is not None:
            index = 0 if after == ROOT else self.items.index(self.find(after)) + 1
        self.items.insert(index, item)
        return self.items[index - 1].id if index else None

    def _has_call(self, call_id: str) -> bool:
        return any(i.call is not None and i.call.id == call_id and i.role == "assistant" for i in self.items)

    def append(self, item: Item) -> str | None:
        """Puts an answer at the end, whatever the count: it was asked for. Returns the id of the one before it."""
        self.items.append(item)
        return self.items[-2].id if len(self.items) > 1 else None

    def remove(self, item_id: str) -> None:
        self.items.remove(self.find(item_id))

    def overflow(self, limit_s: float) -> list[str]:
        """Ids of the oldest items that must go for the conversation's audio to fit; the newest item stays."""
        seconds = sum(item.audio_s for item in self.items)
        gone = list[str]()
        for item in self.items[:-1]:
            if seconds <= limit_s:
                break
            seconds -= item.audio_s
            gone.append(item.id)
        return gone


def engine_messages(instructions: str, items: list[Item], limit_chars: int) -> tuple[list[dict[str, Any]], Media]:
    """Messages and the media they name; calls that were cut while they were made are left out.

    Raises RequestError when the text is longer than the limit.
    """
    cut = {item.call.id for item in items if item.call is not None and item.status != "completed"}
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    media: Media = {}
    for item in items:
        if item.call is None:
            _add_said(messages, item, media)
        elif item.call.id not in cut:
            _add_call(messages, item, item.call)
    if sum(_characters(message) for message in messages) > limit_chars:
        raise RequestError(f"the conversation has more than {limit_chars} characters of text", param="conversation")
    return messages, media


def _add_said(messages: list[dict[str, Any]], item: Item, media: Media) -> None:
    content = [_engine_part(part, media) for part in item.content if not part.empty]
    if content and item.role == "user":
        messages.append({"role": "user", "content": content})
    elif content:
        messages.append({"role": item.role, "content": "".join(part["text"] for part in content)})


def _engine_part(part: Content, media: Media) -> dict[str, Any]:
    key = f"media{len(media)}"
    if part.audio is not None:
        media[key] = MultimodalPayload.of({"sample_rate": part.rate}, audio=part.audio)
        return {"type": "audio", "media": key}
    if part.image is not None:
        media[key] = MultimodalPayload(part.image.tensors, part.image.meta)
        return {"type": "image", "media": key}
    return {"type": "text", "text": part.text or ""}


def _add_call(messages: list[dict[str, Any]], item: Item, call: MadeCall) -> None:
    """A call belongs to the assistant's message before it, if there is one; what the function gave is its own."""
    if item.role == "tool":
        messages.append({"role": "tool", "content": item.output, "tool_call_id": call.id})
        return
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": call.name, "arguments": call.arguments}
    messages[-1].setdefault("tool_calls", []).append({"id": call.id, "type": "function", "function": function})


def _characters(message: dict[str, Any]) -> int:
    content = message["content"]
    called = sum(len(call["function"]["arguments"]) for call in message.get("tool_calls", ()))
    return called + (len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content))
