"""What a realtime client may send (OpenAI's GA names), and the session it configures. Unknown fields are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omnistage.entrypoints.http.schema import Label, VoiceId
from omnistage.entrypoints.realtime.formats import FormatName
from omnistage.tools import MAX_TOOLS, FunctionName

ItemId = Annotated[str, Meta(min_length=1, max_length=128)]
Instructions = Annotated[str, Meta(max_length=1 << 18)]
Tokens = Annotated[int, Meta(ge=1, le=4096)] | Literal["inf"]
OutputModalities = Annotated[list[Literal["text", "audio"]], Meta(min_length=1, max_length=1)]
Speed = Annotated[float, Meta(ge=0.25, le=1.5)]
Arguments = Annotated[str, Meta(max_length=1 << 18)]
Voice = Annotated[str, Meta(min_length=1, max_length=256)]
Milliseconds = Annotated[int, Meta(ge=0, le=86_400_000)]
ItemStatus = Literal["completed", "incomplete", "in_progress"]


class Part(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One content part of a message; `audio` is base64 in the session's input format."""

    type: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None


class NewItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """What every item has that a client writes."""

    id: ItemId | None = None
    object: Literal["realtime.item"] | None = None
    status: ItemStatus | None = None


class ItemFields(NewItem, kw_only=True, frozen=True, tag="message"):
    """A message as clients write it."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Part], Meta(min_length=1, max_length=64)]


class CallFields(NewItem, kw_only=True, frozen=True, tag="function_call"):
    """A call of a function, made by the model; `arguments` is a JSON object, or empty."""

    name: FunctionName
    arguments: Arguments
    call_id: ItemId | None = None


class OutputFields(NewItem, kw_only=True, frozen=True, tag="function_call_output"):
    """What the function gave that the model called as `call_id`."""

    call_id: ItemId
    output: Arguments


AnyItem = ItemFields | CallFields | OutputFields


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    type: Literal["function"]
    name: FunctionName
    description: Annotated[str, Meta(max_length=1 << 16)] | None = None
    parameters: dict[str, Any] | None = None


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    type: Literal["function"]
    name: FunctionName


Tools = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["auto", "none", "required"] | NamedTool


class ItemReference(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True, tag="item_reference"):
    """An item of the conversation by its id."""

    id: ItemId


class AudioFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """As OpenAI writes it: `rate` in Hz with PCM only, whether it was given or not."""

    type: FormatName = "audio/pcm"
    rate: Literal[24000] | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "rate", 24000 if self.type == "audio/pcm" else msgspec.UNSET)


class ServerVad(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Turns by voice activity. `idle_timeout_ms` is not offered: only null is taken."""

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=5000)] = 300
    silence_duration_ms: Annotated[int, Meta(ge=32, le=10_000)] = 500
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: None = None


class InputTranscription(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """`model` is a label: the served model hears."""

    model: Label | None = None
    language: Annotated[str, Meta(max_length=32)] | None = None
    prompt: Annotated[str, Meta(max_length=4096)] | None = None


class AudioInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    format: AudioFormat = AudioFormat()
    transcription: InputTranscription | None = None
    turn_detection: ServerVad | None = ServerVad()
    noise_reduction: None = None


class AudioOutput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    format: AudioFormat = AudioFormat()
    voice: Voice | VoiceId | None = None
    speed: Speed = 1.0


class SessionAudio(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    input: AudioInput = AudioInput()
    output: AudioOutput = AudioOutput()


class Session(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A session's settings. With `truncation` "auto" the oldest items go when the conversation holds too much audio."""

    type: Literal["realtime"] = "realtime"
    object: Literal["realtime.session"] = "realtime.session"
    id: ItemId
    model: Label
    instructions: Instructions = ""
    output_modalities: OutputModalities
    audio: SessionAudio = SessionAudio()
    max_output_tokens: Tokens = "inf"
    truncation: Literal["auto", "disabled"] = "auto"
    tools: Tools = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    tracing: None = None
    prompt: None = None
    include: None = None


class ResponseOutput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    format: AudioFormat | None = None
    voice: Voice | VoiceId | None = None


class ResponseAudio(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    output: ResponseOutput = ResponseOutput()


class ResponseFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """What one response does differently from the session. `conversation` "none" keeps it out of the conversation."""

    instructions: Instructions | None = None
    output_modalities: OutputModalities | None = None
    audio: ResponseAudio = ResponseAudio()
    max_output_tokens: Tokens | None = None
    conversation: Literal["auto", "none"] = "auto"
    metadata: Annotated[dict[Label, Label], Meta(max_length=16)] | None = None
    input: Annotated[list[AnyItem | ItemReference], Meta(max_length=1024)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class ClientEvent(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True, tag_field="type"):
    event_id: Annotated[str, Meta(max_length=512)] | None = None


class SessionUpdate(ClientEvent, frozen=True, tag="session.update"):
    """`session` holds what changes; null switches off what can be."""

    session: dict[str, Any]


class AudioAppend(ClientEvent, frozen=True, tag="input_audio_buffer.append"):
    audio: str


class AudioCommit(ClientEvent, frozen=True, tag="input_audio_buffer.commit"):
    pass


class AudioClear(ClientEvent, frozen=True, tag="input_audio_buffer.clear"):
    pass


class OutputClear(ClientEvent, frozen=True, tag="output_audio_buffer.clear"):
    pass


class ItemCreate(ClientEvent, frozen=True, tag="conversation.item.create"):
    item: AnyItem
    previous_item_id: ItemId | None = None


class ItemRetrieve(ClientEvent, frozen=True, tag="conversation.item.retrieve"):
    item_id: ItemId


class ItemTruncate(ClientEvent, frozen=True, tag="conversation.item.truncate"):
    item_id: ItemId
    content_index: Literal[0]
    audio_end_ms: Milliseconds


class ItemDelete(ClientEvent, frozen=True, tag="conversation.item.delete"):
    item_id: ItemId


class ResponseCreate(ClientEvent, frozen=True, tag="response.create"):
    response: ResponseFields | None = None


class ResponseCancel(ClientEvent, frozen=True, tag="response.cancel"):
    response_id: ItemId | None = None


AnyClientEvent = (
    SessionUpdate
    | AudioAppend
    | AudioCommit
    | AudioClear
    | OutputClear
    | ItemCreate
    | ItemRetrieve
    | ItemTruncate
    | ItemDelete
    | ResponseCreate
    | ResponseCancel
)
client_events = msgspec.json.Decoder(AnyClientEvent)


class _Named(msgspec.Struct):
    event_id: Any = None


def event_id_of(text: str | bytes) -> str | None:
    """The id of an event that is not valid; None where it has none, or where what follows the fault is no JSON."""
    try:
        event_id = msgspec.json.decode(text, type=_Named).event_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return event_id if isinstance(event_id, str) else None


def merged(session: Session, changes: dict[str, Any]) -> Session:
    """The session with the changes. Raises msgspec.ValidationError naming the field at fault."""
    return msgspec.convert(_merge(msgspec.to_builtins(session), changes), Session)


def _merge(old: Any, new: dict[str, Any]) -> dict[str, Any]:
    """Mappings merge key by key, anything else replaces; what was null or gets null is replaced as a whole."""
    base: dict[str, Any] = dict(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        base[key] = _merge(base.get(key), value) if isinstance(value, dict) else value
    return base
