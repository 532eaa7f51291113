"""What one choice has produced so far, and the token usage of an answer."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from omnistage.entrypoints.http.answers import (
    AudioUsage,
    CalledFunction,
    CompletionLogprobs,
    DeltaToolCall,
    Finish,
    PromptDetails,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
)
from omnistage.errors import ErrorCode, OmniError
from omnistage.request import FinishReason, OmniRequestOutput, RequestMetrics, is_reasoning
from omnistage.tools import MadeCalls

_FINISH: dict[FinishReason, Finish] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ChoiceResult:
    """Collects the events of one choice. `text_stages` are the stages that its text came from."""

    def __init__(self, index: int, want_metrics: bool, request_id: str = "") -> None:
        self.index = index
        self._made = MadeCalls(request_id)
        self.text_parts = list[str]()
        self.reasoning_parts = list[str]()
        self.logprobs = list[TokenLogprob]()
        self.text_stages = set[str]()
        self.finish: Finish | None = None
        self.seed: int | UnsetType = UNSET
        self.metrics = RequestMetrics()
        self._want_metrics = want_metrics

    @property
    def text(self) -> str:
        return "".join(self.text_parts)

    @property
    def reasoning(self) -> str:
        """What the model thought before its answer."""
        return "".join(self.reasoning_parts)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that the model made, as far as they have come."""
        return [ToolCall(call.id, CalledFunction(call.name, call.arguments)) for call in self._made.calls]

    @property
    def shown_metrics(self) -> RequestMetrics | UnsetType:
        return self.metrics if self._want_metrics else UNSET

    def note(self, event: OmniRequestOutput) -> list[TokenLogprob]:
        """Takes an event; returns the logprobs of its tokens (empty when none were asked for)."""
        logprobs = list[TokenLogprob]()
        if event.modality == "text":
            self.text_stages.add(event.stage)
            (self.reasoning_parts if is_reasoning(event) else self.text_parts).append(event.text)
            if event.payload is not None:
                self._made.take(event.payload.meta.get("tool_calls", []))
            if event.payload is not None and "logprobs" in event.payload.meta:
                logprobs = [_token_logprob(entry) for entry in event.payload.meta["logprobs"]]
                self.logprobs += logprobs
        if event.finished:
            self._close(event)
        return logprobs

    def _close(self, event: OmniRequestOutput) -> None:
        if event.finish_reason not in _FINISH:
            raise OmniError("the engine gave no finish reason", code=ErrorCode.INTERNAL)
        self.finish = _FINISH[event.finish_reason]
        if self._made.calls and self.finish == "stop":
            self.finish = "tool_calls"
        if event.seed is not None:
            self.seed = event.seed
        if event.metrics is not None:
            self.metrics = event.metrics


def call_deltas(result: ChoiceResult, event: OmniRequestOutput) -> list[DeltaToolCall]:
    """What an event that `result` has taken says of calls: id and name once per call, then pieces of its arguments."""
    news = event.payload.meta.get("tool_calls", []) if event.payload is not None else []
    return [_call_delta(result, item) for item in news]


def _call_delta(result: ChoiceResult, item: dict[str, Any]) -> DeltaToolCall:
    piece = CalledFunction(item.get("name") or UNSET, item.get("arguments", ""))
    if not item.get("name"):
        return DeltaToolCall(item["index"], piece)
    return DeltaToolCall(item["index"], piece, result.calls[item["index"]].id, "function")


def _token_logprob(entry: dict[str, Any]) -> TokenLogprob:
    """The engine's entry {"token", "logprob", "top_logprobs": [{"token", "logprob"}], "bytes"?} in OpenAI's shape."""
    top = [TopLogprob(t["token"], t["logprob"], _bytes_of(t)) for t in entry.get("top_logprobs", ())]
    return TokenLogprob(entry["token"], entry["logprob"], _bytes_of(entry), top)


def _bytes_of(entry: dict[str, Any]) -> list[int]:
    raw = entry.get("bytes")
    return list(entry["token"].encode() if raw is None else raw)


def completion_logprobs(entries: list[TokenLogprob], offset: int) -> CompletionLogprobs:
    """The older completions shape; `offset` is the character position of the first token."""
    shape = CompletionLogprobs([], [], [], [])
    for entry in entries:
        shape.tokens.append(entry.token)
        shape.token_logprobs.append(entry.logprob)
        shape.top_logprobs.append({top.token: top.logprob for top in entry.top_logprobs})
        shape.text_offset.append(offset)
        offset += len(entry.token)
    return shape


def usage_of(choices: list[ChoiceResult], text_stages: frozenset[str], choices_per_prompt: int) -> Usage:
    """Tokens of the text-writing stages, summed over choices; a prompt counts once for all its choices.

    `text_stages` stand in for a choice that wrote no text at all.
    """
    prompt = cached = completion = 0
    for choice in choices:
        for stage in choice.text_stages or text_stages:
            figures = choice.metrics.stages.get(stage)
            if figures is None:
                continue
            completion += figures.output_tokens
            if choice.index % choices_per_prompt == 0:
                prompt += figures.input_tokens
                cached += figures.cached_tokens
    return Usage(prompt, completion, prompt + completion, PromptDetails(cached))


def audio_usage(metrics: RequestMetrics) -> AudioUsage:
    """Tokens of all stages that a speech or transcription request ran through."""
    read = sum(stage.input_tokens for stage in metrics.stages.values())
    written = sum(stage.output_tokens for stage in metrics.stages.values())
    return AudioUsage(read, written, read + written)
