"""Client fields -> engine requests: messages, media, sampling."""

from __future__ import annotations

from typing import Any

import msgspec

from omnistage.config.model import LimitsConfig
from omnistage.entrypoints.http import schema
from omnistage.entrypoints.http.state import ServerState
from omnistage.entrypoints.http.text_shape import text_shape
from omnistage.errors import RequestError
from omnistage.media.data_url import decode_base64
from omnistage.media.jobs import DecodeJob, MediaKind
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from omnistage.sampling import SamplingParams, sampling_params

MAX_MEDIA_PARTS = 64
# Odd constant of a Weyl sequence (2^64 / golden ratio): spreads the seeds of choices.
SEED_STEP = 0x9E3779B97F4A7C15

# Sampling parameters that stand at the top of a request under their own names.
_PLAIN_SAMPLING = (
    frozenset(SamplingParams.__struct_fields__)
    .intersection(schema.TextSampling.__struct_fields__)
    .difference(("seed", "stop", "structured_outputs"))
)


class MediaItem(msgspec.Struct, frozen=True):
    """A media part still encoded: base64 (`is_url` False) or a data URL, and the field it came in. `with_sound`: the
    sound track of a video is wanted too."""

    key: str
    kind: MediaKind
    source: str
    is_url: bool
    param: str
    with_sound: bool = False


class EngineMessages(msgspec.Struct, frozen=True):
    """Messages in the engine's shape, and the media that they name."""

    messages: list[dict[str, Any]]
    media: list[MediaItem]


class MessageReader:
    """Turns the messages of one request into the engine's; counts characters and media parts against the limits."""

    def __init__(self, state: ServerState, *, hears_videos: bool = False) -> None:
        self._state = state
        self._hears_videos = hears_videos
        self._chars = 0
        self._media = list[MediaItem]()

    def read(self, messages: list[schema.ChatMessage]) -> EngineMessages:
        """Raises RequestError naming the message at fault."""
        return EngineMessages([self._message(m, f"messages[{i}]") for i, m in enumerate(messages)], self._media)

    def _message(self, message: schema.ChatMessage, param: str) -> dict[str, Any]:
        if isinstance(message, schema.AssistantMessage):
            calls = {"tool_calls": self._calls(message.tool_calls, param)} if message.tool_calls else {}
            return {"role": "assistant", "content": self._assistant(message, param)} | calls
        if isinstance(message, schema.ToolMessage):
            content = self._content(message.content, f"{param}.content")
            return {"role": "tool", "content": _as_text(content), "tool_call_id": message.tool_call_id}
        role = "user" if isinstance(message, schema.UserMessage) else "system"
        read: dict[str, Any] = {"role": role, "content": self._content(message.content, f"{param}.content")}
        if message.name is not None:
            read["name"] = message.name
        return read

    def _assistant(self, message: schema.AssistantMessage, param: str) -> str:
        if message.content:
            parts = message.content if isinstance(message.content, list) else [schema.TextPart(message.content)]
            texts = [p.text if isinstance(p, schema.TextPart) else p.refusal for p in parts]
            return self._count("".join(texts), f"{param}.content")
        if message.audio is not None:
            return self._count(self._spoken(message.audio, f"{param}.audio.id"), f"{param}.audio")
        if message.content is None and message.refusal is None and not message.tool_calls:
            raise RequestError(
                f"{param}: an assistant message needs content, audio or tool_calls", param=f"{param}.content"
            )
        return self._count(message.refusal or "", f"{param}.refusal")

    def _calls(self, calls: list[schema.PastCall], param: str) -> list[dict[str, Any]]:
        read = list[dict[str, Any]]()
        for index, call in enumerate(calls):
            arguments = self._count(call.function.arguments, f"{param}.tool_calls[{index}].function.arguments")
            function = {"name": call.function.name, "arguments": arguments}
            read.append({"id": call.id, "type": "function", "function": function})
        return read

    def _spoken(self, audio: schema.PastAudio, param: str) -> str:
        transcript = self._state.transcripts.find(audio.id)
        if transcript is None:
            transcript = audio.transcript
        if transcript is None:
            raise RequestError(f"{param}: no spoken answer of this id is known, or it has expired", param=param)
        return transcript

    def _content(self, content: str | list[Any], param: str) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return self._count(content, param)
        return [self._part(part, f"{param}[{i}]") for i, part in enumerate(content)]

    def _part(self, part: schema.UserPart, param: str) -> dict[str, Any]:
        match part:
            case schema.TextPart(text=text):
                return {"type": "text", "text": self._count(text, f"{param}.text")}
            case schema.InputAudioPart(input_audio=audio):
                return self._media_part("audio", audio.data, False, f"{param}.input_audio.data")
            case schema.AudioUrlPart(audio_url=target):
                return self._media_part("audio", target.url, True, f"{param}.audio_url.url")
            case schema.ImageUrlPart(image_url=image):
                return self._media_part("image", image.url, True, f"{param}.image_url.url")
            case schema.VideoUrlPart(video_url=target):
                return self._media_part("video", target.url, True, f"{param}.video_url.url")

    def _media_part(self, kind: MediaKind, source: str, is_url: bool, param: str) -> dict[str, Any]:
        if len(self._media) >= MAX_MEDIA_PARTS:
            raise RequestError(f"{param}: more than {MAX_MEDIA_PARTS} media parts", param=param)
        heard = self._hears_videos and kind == "video"
        item = MediaItem(f"{kind}{len(self._media)}", kind, source, is_url, param, heard)
        self._media.append(item)
        return {"type": kind, "media": item.key}

    def _count(self, text: str, param: str) -> str:
        self._chars += len(text)
        check_chars(self._chars, self._state.limits, param)
        return text


def _as_text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def check_chars(count: int, limits: LimitsConfig, param: str) -> None:
    """Raises RequestError when the text of a request is longer than the limit."""
    if count > limits.max_input_chars:
        message = f"{param}: the request has more than {limits.max_input_chars} characters of text"
        raise RequestError(message, param=param)


async def load_media(state: ServerState, items: list[MediaItem]) -> dict[str, MultimodalPayload]:
    """Decodes media off the event loop, one after the other: memory is bounded by one decode beyond the results."""
    return {item.key: await _load(state, item) for item in items}


async def _load(state: ServerState, item: MediaItem) -> MultimodalPayload:
    read = state.source.read if item.is_url else decode_base64
    data = await state.run(read, item.source, state.max_body, item.param)
    job = DecodeJob(kind=item.kind, limits=state.limits, param=item.param, with_sound=item.with_sound)
    return await state.decode(job, data)


def sampling_of(state: ServerState, body: schema.Labels) -> dict[str, dict[str, Any]]:
    """Sampling per stage; the key "" is the pipeline's text stage. Raises RequestError naming stage and field."""
    state.check_stage_names(list(body.sampling))
    for stage, values in body.sampling.items():
        sampling_params(stage, values)
    layers = dict(body.sampling)
    if isinstance(body, schema.TextSampling):
        layers[""] = _text_stage_sampling(body)
    return layers


def _text_stage_sampling(body: schema.TextSampling) -> dict[str, Any]:
    fields = msgspec.structs.asdict(body)
    values = {name: fields[name] for name in _PLAIN_SAMPLING if fields[name] is not None}
    shape = text_shape(body)
    if shape is not None:
        values["structured_outputs"] = shape
    if body.stop is not None:
        values["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if isinstance(body, schema.ChatRequest):
        values |= _chat_sampling(body)
    elif isinstance(body, schema.CompletionRequest) and body.logprobs is not None:
        values |= {"logprobs": True, "top_logprobs": body.logprobs}
    return values


def _chat_sampling(body: schema.ChatRequest) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise RequestError("max_tokens and max_completion_tokens differ", param="max_tokens")
        values["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.logprobs:
        values |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return values


def voice_of(state: ServerState, voice: schema.Voice | None, param: str) -> str | None:
    """The voice's name. Raises RequestError for one that the pipeline does not have."""
    if voice is None:
        return None
    name = voice.id if isinstance(voice, schema.VoiceId) else voice
    voices = state.engine.pipeline.voices
    if name not in voices:
        raise RequestError(f"{param}: unknown voice; this model has: {', '.join(voices) or 'none'}", param=param)
    return name


def choice_requests(request: OmniRequest, count: int) -> list[OmniRequest]:
    """One engine request per choice. Choice 0 keeps id and seed, the others get ids and seeds derived from them."""
    copies = [request]
    for index in range(1, count):
        seed = None if request.seed is None else (request.seed + index * SEED_STEP) % 2**63
        copies.append(msgspec.structs.replace(request, id=f"{request.id}-{index}", seed=seed))
    return copies
