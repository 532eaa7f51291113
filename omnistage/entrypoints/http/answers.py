"""What the server answers: the OpenAI response objects as structs. UNSET fields are left out of the JSON."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from omnistage.request import RequestMetrics

Finish = Literal["stop", "length", "tool_calls"]


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of the stage that wrote the text. The prompt counts once for all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class AudioUsage(msgspec.Struct):
    """Usage of speech and transcription."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    type: Literal["tokens"] = "tokens"


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class MessageAudio(msgspec.Struct):
    """`data` is base64 of a file in the asked format; `expires_at` is Unix seconds."""

    id: str
    data: str
    expires_at: int
    transcript: str


class PictureUrl(msgspec.Struct):
    """A data URL."""

    url: str


class PicturePart(msgspec.Struct):
    image_url: PictureUrl
    type: Literal["image_url"] = "image_url"


class CalledFunction(msgspec.Struct):
    """`arguments` is JSON text, or in a stream a piece of it; `name` comes once."""

    name: str | UnsetType
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class DeltaToolCall(msgspec.Struct):
    index: int
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AssistantAnswer(msgspec.Struct):
    """`reasoning_content` (and `reasoning`) is what a thinking model thought before its answer; `images` are pictures
    that it drew."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    audio: MessageAudio | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    images: list[PicturePart] | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """`seed` repeats the answer; `metrics` come when `return_metrics` was set."""

    index: int
    message: AssistantAnswer
    finish_reason: Finish
    logprobs: ChatLogprobs | None = None
    seed: int | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str = ""


class DeltaAudio(msgspec.Struct):
    id: str | UnsetType = UNSET
    data: str | UnsetType = UNSET
    transcript: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    audio: DeltaAudio | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    images: list[PicturePart] | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: Finish | None = None
    logprobs: ChatLogprobs | None = None
    seed: int | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str = ""
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(msgspec.Struct):
    """`text_offset` counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: Finish | None
    logprobs: CompletionLogprobs | None = None
    seed: int | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str = ""
    usage: Usage | UnsetType | None = UNSET


class SpeechDelta(msgspec.Struct, tag="speech.audio.delta", tag_field="type"):
    audio: str


class SpeechDone(msgspec.Struct, tag="speech.audio.done", tag_field="type"):
    usage: AudioUsage
    seed: int | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class TranscriptDelta(msgspec.Struct, tag="transcript.text.delta", tag_field="type"):
    delta: str


class TranscriptDone(msgspec.Struct, tag="transcript.text.done", tag_field="type"):
    text: str
    usage: AudioUsage


class Transcription(msgspec.Struct):
    text: str
    usage: AudioUsage


class Segment(msgspec.Struct, kw_only=True):
    """A stretch of speech, `start` and `end` in seconds. Figures that the model does not give are 0."""

    id: int = 0
    seek: int = 0
    start: float
    end: float
    text: str
    tokens: list[int] = []
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0


class Word(msgspec.Struct):
    word: str
    start: float
    end: float


class DurationUsage(msgspec.Struct):
    seconds: float
    type: Literal["duration"] = "duration"


class VerboseTranscription(msgspec.Struct):
    """`duration` is the length of the audio in seconds; `language` is empty when neither client nor model named one."""

    language: str
    duration: float
    text: str
    segments: list[Segment]
    usage: DurationUsage
    words: list[Word] | UnsetType = UNSET
    task: Literal["transcribe"] = "transcribe"


class ModelCard(msgspec.Struct):
    """OpenAI's model object, plus what the pipeline can do. `sample_rate` is Hz of the speech, null without speech."""

    id: str
    created: int
    tasks: list[str]
    output_modalities: list[str]
    voices: list[str]
    sample_rate: int | None
    object: Literal["model"] = "model"
    owned_by: str = "omnistage"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class VoiceList(msgspec.Struct):
    """`uploaded_voices` stays empty: voices come with the model."""

    voices: list[str]
    uploaded_voices: list[str] = []


class ServerStatus(msgspec.Struct):
    """`reasons` say what is missing when `status` is not the good one."""

    status: str
    reasons: list[str] = []


class Version(msgspec.Struct):
    version: str
