"""POST /v1/completions: text after a raw prompt; whole or streamed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from omnistage.entrypoints.http import schema
from omnistage.entrypoints.http.answers import Completion, CompletionChoice, Usage
from omnistage.entrypoints.http.asgi import JSON, Exchange
from omnistage.entrypoints.http.events import choice_events
from omnistage.entrypoints.http.inputs import check_chars, choice_requests, sampling_of
from omnistage.entrypoints.http.parse import decode_json
from omnistage.entrypoints.http.result import ChoiceResult, completion_logprobs, usage_of
from omnistage.entrypoints.http.sse import DONE, event, json_bytes
from omnistage.entrypoints.http.state import ServerState, new_id
from omnistage.errors import RequestError
from omnistage.request import OmniRequest, OmniRequestOutput

_Prompts = Annotated[list[schema.Text], Meta(min_length=1, max_length=schema.MAX_PROMPTS)]
_TokenPrompts = Annotated[list[schema.TokenIds], Meta(min_length=1, max_length=schema.MAX_PROMPTS)]


class CompletionJob(msgspec.Struct, kw_only=True):
    """A validated request; choice `i` answers prompt `i // choices_per_prompt`. `echoes` is what precedes each text."""

    body: schema.CompletionRequest
    requests: list[OmniRequest]
    echoes: list[str]
    choices_per_prompt: int
    id: str
    created: int


async def completions(state: ServerState, exchange: Exchange) -> None:
    """Answers one completion request."""
    job = _job(state, decode_json(exchange, schema.CompletionRequest))
    if job.body.stream:
        await _Stream(state, exchange, job).run()
    else:
        await _whole(state, exchange, job)


def _job(state: ServerState, body: schema.CompletionRequest) -> CompletionJob:
    state.check_model(body.model)
    state.check_task("completion")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    prompts, count = _prompts(body.prompt), body.n or 1
    if len(prompts) * count > schema.MAX_PROMPTS:
        raise RequestError(f"n: more than {schema.MAX_PROMPTS} choices in all", param="n")
    _check_echo(body, prompts)
    check_chars(sum(len(p) for p in prompts if isinstance(p, str)), state.limits, "prompt")
    job_id, sampling = new_id("cmpl-"), sampling_of(state, body)
    requests = list[OmniRequest]()
    for index, prompt in enumerate(prompts):
        request = _request(body, job_id if index == 0 else f"{job_id}-p{index}", prompt, sampling)
        requests += choice_requests(request, count)
    echoes = [prompt if body.echo and isinstance(prompt, str) else "" for prompt in prompts for _ in range(count)]
    return CompletionJob(
        body=body,
        requests=requests,
        echoes=echoes,
        choices_per_prompt=count,
        id=job_id,
        created=int(time.time()),
    )


def _request(
    body: schema.CompletionRequest, request_id: str, prompt: Sequence[object] | str, sampling: dict[str, dict[str, Any]]
) -> OmniRequest:
    return OmniRequest(
        id=request_id,
        task="completion",
        raw_prompt=prompt if isinstance(prompt, str) else None,
        modalities=("text",),
        sampling=sampling,
        seed=body.seed,
        priority=body.priority,
        timeout=body.timeout,
        stream=bool(body.stream),
        params={} if isinstance(prompt, str) else {"prompt_token_ids": prompt},
    )


def _check_echo(body: schema.CompletionRequest, prompts: list[str] | list[list[int]]) -> None:
    if body.echo and not isinstance(prompts[0], str):
        raise RequestError("echo: only text prompts can be repeated", param="echo")
    if body.echo and body.logprobs is not None:
        raise RequestError("echo: cannot be combined with logprobs", param="echo")


def _prompts(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """Several prompts of one kind. Raises RequestError naming `prompt`."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [_convert(prompt, schema.TokenIds)]
    if prompt and isinstance(prompt[0], list):
        token_prompts: list[list[int]] = _convert(prompt, _TokenPrompts)
        return token_prompts
    texts: list[str] = _convert(prompt, _Prompts)
    return texts


def _convert(prompt: list[Any], into: Any) -> Any:
    try:
        return msgspec.convert(prompt, into)
    except msgspec.ValidationError as error:
        what = str(error).replace("`$", "`prompt")
        raise RequestError(f"prompt: {what}", param="prompt") from None


async def _whole(state: ServerState, exchange: Exchange, job: CompletionJob) -> None:
    results = [ChoiceResult(index, job.body.return_metrics) for index in range(len(job.requests))]
    async with aclosing(choice_events(state.engine, job.requests, {})) as events:
        async for index, output in events:
            results[index].note(output)
    choices = [_choice(result, job.echoes[result.index]) for result in results]
    usage = usage_of(results, state.capabilities.text_stages, job.choices_per_prompt)
    answer = Completion(job.id, job.created, state.model, choices, system_fingerprint=state.fingerprint, usage=usage)
    await exchange.answer(200, JSON, json_bytes(answer))


def _choice(result: ChoiceResult, echo: str) -> CompletionChoice:
    logprobs = completion_logprobs(result.logprobs, 0) if result.logprobs else None
    return CompletionChoice(
        result.index, echo + result.text, result.finish, logprobs, result.seed, result.shown_metrics
    )


class _Stream:
    """One streamed answer; each event carries one choice's text delta, the last of a choice its finish reason."""

    def __init__(self, state: ServerState, exchange: Exchange, job: CompletionJob) -> None:
        self._state, self._exchange, self._job = state, exchange, job
        options = job.body.stream_options
        self._include_usage = options is not None and options.include_usage
        self._results = [ChoiceResult(index, job.body.return_metrics) for index in range(len(job.requests))]
        self._echoes = list(job.echoes)
        self._offsets = [0] * len(self._results)

    async def run(self) -> None:
        exchange = self._exchange
        async with aclosing(choice_events(self._state.engine, self._job.requests, {})) as events:
            async for index, output in events:
                data = self._event(index, output)
                await exchange.send_events(data, DONE)
        await exchange.end(self._usage_event() + DONE)

    def _event(self, index: int, output: OmniRequestOutput) -> bytes:
        result = self._results[index]
        entries = result.note(output)
        text = self._echoes[index] + (output.text if output.modality == "text" else "")
        self._echoes[index] = ""
        if not (text or entries or output.finished):
            return b""
        logprobs = completion_logprobs(entries, self._offsets[index]) if entries else None
        self._offsets[index] += sum(len(entry.token) for entry in entries)
        choice = CompletionChoice(index, text, None, logprobs)
        if output.finished:
            choice.finish_reason = result.finish
            choice.seed, choice.metrics = result.seed, result.shown_metrics
        return event(self._wrap([choice], None if self._include_usage else UNSET))

    def _usage_event(self) -> bytes:
        if not self._include_usage:
            return b""
        usage = usage_of(self._results, self._state.capabilities.text_stages, self._job.choices_per_prompt)
        return event(self._wrap([], usage))

    def _wrap(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        job, state = self._job, self._state
        return Completion(job.id, job.created, state.model, choices, system_fingerprint=state.fingerprint, usage=usage)
