"""What a user asks (`OmniRequest`) and what comes back (`OmniRequestOutput`)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from omnistage.errors import ErrorInfo, RequestError
from omnistage.payload import MultimodalPayload
from omnistage.sampling import SamplingParams
from omnistage.tools import ToolUse


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class OmniRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request, as plain data; media are float32 / uint8 arrays in `media`, never paths or URLs.

    `task` picks an entry of the pipeline's graph ("chat", "completion", "speech", "transcription", "image", ...).
    `prompt` is one user message, `raw_prompt` is used verbatim. Message content parts that are media hold
    `{"type": "audio" | "image" | "video" | ..., "media": key}` with `key` into `media`.
    `modalities` None means every final output of the task. `sampling` is per stage name; the name "" stands for the
    stage whose text the client reads. `params` carries the model's
    own parameter names (spec of the model). `timeout` is seconds from admission. With `stream` False all events come
    together at the end, which lets the request be replayed when a stage dies half-way. `progress` asks for events of
    modality "progress" (meta {"step", "steps"}) where the pipeline gives them. `owner` names who asks: requests of
    different owners share no prefix cache. `tools`, `tool_choice` and `parallel_tool_calls` are those of OpenAI's chat
    completions.
    """

    id: str
    task: str = "chat"
    prompt: str | None = None
    raw_prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    modalities: tuple[str, ...] | None = None
    voice: str | None = None
    sampling: dict[str, dict[str, Any]] = {}
    seed: int | None = None
    priority: int = 0
    timeout: float | None = None
    stream: bool = True
    progress: bool = False
    params: dict[str, Any] = {}
    owner: str = ""
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True


class StageMetrics(msgspec.Struct, omit_defaults=True):
    """Times in seconds on the machine's monotonic clock differences, counts as they say.

    `compute_s` is how long the request's steps took, `work_s` its share of them: over all requests it adds up to the
    time that the stage was busy.
    """

    queue_s: float = 0.0
    compute_s: float = 0.0
    work_s: float = 0.0
    handoff_s: float = 0.0
    steps: int = 0
    chunks_out: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    extra: dict[str, float] = {}


class RequestMetrics(msgspec.Struct, omit_defaults=True):
    """Per-request figures; None where the modality does not occur.

    E2EL counts from admission to the last output, TTFT to the first text, TPOT per token after the first, TTFP to the
    first media packet, RTF = wall time / audio duration.
    """

    e2el_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    ttfp_s: float | None = None
    rtf: float | None = None
    audio_s: float | None = None
    stages: dict[str, StageMetrics] = {}


class OmniRequestOutput(msgspec.Struct, kw_only=True):
    """One event of a request's answer.

    Stream events carry one modality's delta: `text` + `token_ids` for text, `payload` for media, and `seq`, which
    counts from 0 per (stage, modality). The last event of a request has `finished` set, a `finish_reason`, and the
    metrics; exactly one such event comes, and nothing after it.
    """

    request_id: str
    stage: str = ""
    modality: str = ""
    seq: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    payload: MultimodalPayload | None = None
    final: bool = False
    finished: bool = False
    finish_reason: FinishReason | None = None
    seed: int | None = None
    metrics: RequestMetrics | None = None
    error: ErrorInfo | None = None


def is_reasoning(event: OmniRequestOutput) -> bool:
    """True for text that is thought, not said."""
    return event.payload is not None and event.payload.meta.get("reasoning") is True


class StageRequest(msgspec.Struct, kw_only=True):
    """A request as one stage sees it.

    `inputs` are the ports that will deliver chunks, `outputs` the ports that somebody reads in this request (others
    need not be computed). `epoch` counts replays: an engine never sees chunks of older epochs. `cache_salt` separates
    what may be cached for different owners. `tools` are those that its text may call. `traced`: its spans are wanted.
    """

    request_id: str
    epoch: int = 0
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    params: dict[str, Any] = {}
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    priority: int = 0
    cache_salt: str = ""
    tools: ToolUse | None = None
    traced: bool = True


def prompt_of(request: OmniRequest) -> str:
    """The text of a request without a chat template: its prompt, else the text of the last user message.

    Raises RequestError when there is neither.
    """
    given = request.prompt if request.prompt is not None else request.raw_prompt
    if given is not None:
        return given
    for message in reversed(request.messages or []):
        if message.get("role") == "user":
            content = message.get("content", "")
            if isinstance(content, str):
                return content
            return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    raise RequestError("no prompt and no user message", param="messages")
