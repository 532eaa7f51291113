"""What clients may send: JSON bodies of the POST routes. Every unknown field is an error and every number has bounds.

Fields named in `Labels` are accepted for compatibility and change nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omnistage.sampling import MAX_TOKENS_LIMIT, TOP_LOGPROBS_LIMIT

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Label = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=1 << 26)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenCount = Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
TokenKey = Annotated[str, Meta(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
# Seconds. What no request could keep is no deadline.
Timeout = Annotated[float, Meta(ge=1, le=86_400)]
StageSampling = Annotated[dict[str, dict[str, Any]], Meta(max_length=64)]


class Labels(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Labels that clients send and that change nothing, and the fields that every request has."""

    model: Name | None = None
    user: Label | None = None
    metadata: Annotated[dict[Label, Label], Meta(max_length=64)] | None = None
    store: bool | None = None
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    seed: Seed | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    timeout: Timeout | None = None
    sampling: StageSampling = {}
    return_metrics: bool = False


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class TextSampling(Labels, kw_only=True):
    """Sampling of the stage that writes the text; `sampling` reaches the other stages by name. `guided_json` and so on
    are older names of the fields of `structured_outputs`."""

    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Meta(max_length=4096)] | None = None
    max_tokens: TokenCount | None = None
    min_tokens: TokenCount | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Text | dict[str, Any] | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None


class VoiceId(msgspec.Struct, forbid_unknown_fields=True):
    id: Name


Voice = Name | VoiceId


class TextPart(msgspec.Struct, tag="text", tag_field="type", forbid_unknown_fields=True):
    text: Text


class RefusalPart(msgspec.Struct, tag="refusal", tag_field="type", forbid_unknown_fields=True):
    refusal: Text


class InputAudio(msgspec.Struct, forbid_unknown_fields=True):
    """`data` is base64; the container is recognised by its bytes, `format` is what the client says it is."""

    data: Text
    format: Literal["wav", "mp3", "flac", "opus", "ogg", "aac", "m4a", "mp4", "webm"]


class InputAudioPart(msgspec.Struct, tag="input_audio", tag_field="type", forbid_unknown_fields=True):
    input_audio: InputAudio


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True):
    """A data: URL. `detail` "auto" is the only one: images are used as the model's processor wants them."""

    url: Text
    detail: Literal["auto"] | None = None


class MediaUrl(msgspec.Struct, forbid_unknown_fields=True):
    """A data: URL."""

    url: Text


class ImageUrlPart(msgspec.Struct, tag="image_url", tag_field="type", forbid_unknown_fields=True):
    image_url: ImageUrl


class AudioUrlPart(msgspec.Struct, tag="audio_url", tag_field="type", forbid_unknown_fields=True):
    audio_url: MediaUrl


class VideoUrlPart(msgspec.Struct, tag="video_url", tag_field="type", forbid_unknown_fields=True):
    video_url: MediaUrl


UserPart = TextPart | InputAudioPart | ImageUrlPart | AudioUrlPart | VideoUrlPart
TextParts = Annotated[list[TextPart], Meta(min_length=1, max_length=1024)]
UserParts = Annotated[list[UserPart], Meta(min_length=1, max_length=1024)]
AssistantParts = Annotated[list[TextPart | RefusalPart], Meta(max_length=1024)]


class SystemMessage(msgspec.Struct, tag="system", tag_field="role", forbid_unknown_fields=True, kw_only=True):
    content: Text | TextParts
    name: Label | None = None


class DeveloperMessage(msgspec.Struct, tag="developer", tag_field="role", forbid_unknown_fields=True, kw_only=True):
    content: Text | TextParts
    name: Label | None = None


class UserMessage(msgspec.Struct, tag="user", tag_field="role", forbid_unknown_fields=True, kw_only=True):
    content: Text | UserParts
    name: Label | None = None


class PastAudio(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An earlier spoken answer; only `id` is used, the rest is what clients copy from that answer."""

    id: Name
    data: Text | None = None
    expires_at: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    transcript: Text | None = None


class PastFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`parsed_arguments` is what clients made of `arguments`; it is not read."""

    name: Name
    arguments: Text
    parsed_arguments: Any = None


class PastCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    id: Name
    function: PastFunction
    type: Literal["function"] = "function"
    index: Annotated[int, Meta(ge=0, le=128)] | None = None


class ToolMessage(msgspec.Struct, tag="tool", tag_field="role", forbid_unknown_fields=True, kw_only=True):
    """What a called function gave."""

    content: Text | TextParts
    tool_call_id: Name
    name: Label | None = None


class AssistantMessage(msgspec.Struct, tag="assistant", tag_field="role", forbid_unknown_fields=True, kw_only=True):
    """An earlier answer, as this server gave it: the fields that are always null may be sent back as null. What was
    thought before it, and what a client has `parsed` it into, is no part of the conversation."""

    content: Text | AssistantParts | None = None
    audio: PastAudio | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    parsed: Any = None
    name: Label | None = None
    refusal: Text | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    function_call: None = None
    tool_calls: Annotated[list[PastCall], Meta(max_length=128)] | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class AudioOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How to speak. pcm16 is s16le at 24 kHz, mono."""

    format: Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"] = "wav"
    voice: Voice | None = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`name` and `description` are the client's; a schema that cannot be enforced is refused if `strict`."""

    name: Name
    schema: dict[str, Any]
    strict: bool | None = None
    description: Text | None = None


class TextFormat(msgspec.Struct, tag="text", tag_field="type", forbid_unknown_fields=True):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag="json_object", tag_field="type", forbid_unknown_fields=True):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, tag="json_schema", tag_field="type", forbid_unknown_fields=True):
    json_schema: JsonSchemaFormat


ResponseFormat = TextFormat | JsonObjectFormat | SchemaFormat


class ChatRequest(TextSampling, kw_only=True):
    """Body of POST /v1/chat/completions. From `bot_task` on: for models that draw; `params` holds others by their own
    names."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    modalities: Annotated[list[Name], Meta(min_length=1, max_length=8)] | None = None
    audio: AudioOptions | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_LIMIT)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Name | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    mm_processor_kwargs: dict[str, Any] = {}
    bot_task: Annotated[str, Meta(max_length=64)] | None = None
    use_system_prompt: Annotated[str, Meta(max_length=32_768)] | None = None
    size: Annotated[str, Meta(max_length=16)] | None = None
    height: Annotated[int, Meta(ge=1, le=16_384)] | None = None
    width: Annotated[int, Meta(ge=1, le=16_384)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    flow_shift: Annotated[float, Meta(gt=0.0, le=1000.0)] | None = None
    params: Annotated[dict[str, Any], Meta(max_length=64)] = {}


TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS_LIMIT)]
MAX_PROMPTS = 128


class CompletionRequest(TextSampling, kw_only=True):
    """Body of POST /v1/completions. `prompt` is one text, several, one list of token ids, or several."""

    prompt: Text | list[Any]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_LIMIT)] | None = None
    suffix: None = None
    best_of: Literal[1] | None = None


class SpeechRequest(Labels, kw_only=True):
    """Body of POST /v1/audio/speech. `stream` false sends one whole file; sse streams events; default streams bytes."""

    input: Annotated[str, Meta(min_length=1, max_length=4096)]
    voice: Voice | None = None
    instructions: Annotated[str, Meta(max_length=4096)] | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "mp3"
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] = 1.0
    stream_format: Literal["audio", "sse"] | None = None
    stream: bool | None = None


Granularity = Literal["word", "segment"]


class TranscriptionForm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The text fields of POST /v1/audio/transcriptions (multipart); `file` carries the audio."""

    model: Name | None = None
    language: Annotated[str, Meta(pattern=r"^[a-z]{2,3}(-[A-Za-z]{2,4})?$")] | None = None
    prompt: Annotated[str, Meta(max_length=16_384)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    timestamp_granularities: Annotated[list[Granularity], Meta(max_length=2)] = []
    stream: bool = False
    seed: Seed | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    timeout: Timeout | None = None
