"""POST /v1/chat/completions: text, with speech or pictures where the model gives them; whole or streamed."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from omnistage.entrypoints.http.answers import (
    AssistantAnswer,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    DeltaAudio,
    MessageAudio,
    PicturePart,
    TokenLogprob,
    Usage,
)
from omnistage.entrypoints.http.asgi import JSON, Exchange
from omnistage.entrypoints.http.audio_out import AudioCollector, AudioStream, base64_text, encoder_name
from omnistage.entrypoints.http.events import Media, choice_events
from omnistage.entrypoints.http.inputs import MessageReader, choice_requests, load_media, sampling_of, voice_of
from omnistage.entrypoints.http.parse import decode_json
from omnistage.entrypoints.http.pictures_out import picture_parts
from omnistage.entrypoints.http.result import ChoiceResult, call_deltas, usage_of
from omnistage.entrypoints.http.schema import ChatRequest
from omnistage.entrypoints.http.sse import DONE, event, json_bytes
from omnistage.entrypoints.http.state import ServerState, new_id
from omnistage.entrypoints.http.transcripts import LIFETIME_S
from omnistage.errors import RequestError
from omnistage.request import OmniRequest, OmniRequestOutput, is_reasoning

MODALITIES = ("text", "audio", "image")
_MODEL_FIELDS = (
    "bot_task", "use_system_prompt", "size", "height", "width", "num_inference_steps", "guidance_scale", "flow_shift",
)  # fmt: skip


class ChatJob(msgspec.Struct, kw_only=True):
    """A validated request. `audio_format` is empty for an answer without speech."""

    body: ChatRequest
    requests: list[OmniRequest]
    media: Media
    audio_format: str
    id: str
    created: int


async def chat_completions(state: ServerState, exchange: Exchange) -> None:
    """Answers one chat request."""
    job = await _job(state, decode_json(exchange, ChatRequest))
    if job.body.stream:
        await _Stream(state, exchange, job).run()
    else:
        await _whole(state, exchange, job)


async def _job(state: ServerState, body: ChatRequest) -> ChatJob:
    state.check_model(body.model)
    state.check_task("chat")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    modalities = _modalities(state, body)
    hears_videos = body.mm_processor_kwargs.get("use_audio_in_video") is True
    read = MessageReader(state, hears_videos=hears_videos).read(body.messages)
    request = OmniRequest(
        id=new_id("chatcmpl-"),
        task="chat",
        messages=read.messages,
        modalities=modalities,
        voice=voice_of(state, body.audio.voice if body.audio else None, "audio.voice"),
        sampling=sampling_of(state, body),
        seed=body.seed,
        priority=body.priority,
        timeout=body.timeout,
        stream=bool(body.stream),
        params=_model_params(body),
        tools=body.tools or [],
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )
    audio_format = encoder_name(body.audio.format if body.audio else "wav") if "audio" in modalities else ""
    return ChatJob(
        body=body,
        requests=choice_requests(request, body.n or 1),
        media=await load_media(state, read.media),
        audio_format=audio_format,
        id=request.id,
        created=int(time.time()),
    )


def _model_params(body: ChatRequest) -> dict[str, Any]:
    """The model's own parameters, by their names."""
    given = msgspec.structs.asdict(body)
    params = {name: given[name] for name in _MODEL_FIELDS if given[name] is not None}
    if body.mm_processor_kwargs:
        params["mm_processor_kwargs"] = body.mm_processor_kwargs
    for name, value in body.params.items():
        if name in given:
            raise RequestError(f"params.{name}: give it as a field of its own", param=f"params.{name}")
        params[name] = value
    return params


def _modalities(state: ServerState, body: ChatRequest) -> tuple[str, ...]:
    """What the engine shall produce. Speech always brings its text: it is the transcript."""
    asked = body.modalities or ["text"]
    offered = [name for name in MODALITIES if name in state.capabilities.output_modalities]
    for name in asked:
        if name not in offered:
            raise RequestError(
                f"modalities: {name!r} is not offered (offered: {', '.join(offered)})", param="modalities"
            )
    if "audio" not in asked and body.audio is not None:
        raise RequestError('audio: add "audio" to modalities, or leave audio out', param="audio")
    return tuple(name for name in offered if name in asked or name == "text")


async def _whole(state: ServerState, exchange: Exchange, job: ChatJob) -> None:
    results = [ChoiceResult(i, job.body.return_metrics, ask.id) for i, ask in enumerate(job.requests)]
    sounds = [AudioCollector(state, job.audio_format) if job.audio_format else None for _ in results]
    pictures: list[list[PicturePart]] = [[] for _ in results]
    async with aclosing(choice_events(state.engine, job.requests, job.media)) as events:
        async for index, output in events:
            results[index].note(output)
            sound = sounds[index]
            if sound is not None:
                sound.feed(output.payload)
            pictures[index] += await picture_parts(state, output)
    choices = [await _choice(state, *parts) for parts in zip(results, sounds, pictures, strict=True)]
    usage = usage_of(results, state.capabilities.text_stages, len(results))
    answer = ChatCompletion(job.id, job.created, state.model, choices, usage, system_fingerprint=state.fingerprint)
    await exchange.answer(200, JSON, json_bytes(answer))


async def _choice(
    state: ServerState, result: ChoiceResult, sound: AudioCollector | None, pictures: list[PicturePart]
) -> ChatChoice:
    assert result.finish is not None
    calls = result.calls
    message = AssistantAnswer(result.text or (None if calls else ""))
    if sound is not None and (result.text or not calls):
        data = base64_text(await sound.encode())
        audio_id = new_id("audio_")
        state.transcripts.keep(audio_id, result.text)
        message = AssistantAnswer(None, audio=MessageAudio(audio_id, data, int(time.time()) + LIFETIME_S, result.text))
    if result.reasoning:
        message.reasoning_content = message.reasoning = result.reasoning
    if calls:
        message.tool_calls = calls
    if pictures:
        message.images = pictures
    logprobs = ChatLogprobs(result.logprobs) if result.logprobs else None
    return ChatChoice(result.index, message, result.finish, logprobs, result.seed, result.shown_metrics)


class _ChoiceStream:
    """The deltas of one choice. The first carries the role; those of a spoken answer are under `audio`."""

    def __init__(self, state: ServerState, result: ChoiceResult, audio_format: str) -> None:
        self.result = result
        self._state = state
        self._audio = AudioStream(state, audio_format) if audio_format else None
        self._audio_id = new_id("audio_") if audio_format else ""
        self._opened = False

    async def deltas(self, output: OmniRequestOutput) -> list[ChunkChoice]:
        """The chunk choices for one event of the engine."""
        logprobs = self.result.note(output)
        chunks = list[ChunkChoice]()
        if not self._opened:
            self._opened = True
            chunks.append(self._chunk(self._first()))
        if (output.text and output.modality == "text") or logprobs:
            chunks.append(self._chunk(self._words(output), logprobs))
        calls = call_deltas(self.result, output)
        if calls:
            chunks.append(self._chunk(Delta(tool_calls=calls)))
        pictures = await picture_parts(self._state, output)
        if pictures:
            chunks.append(self._chunk(Delta(images=pictures)))
        if self._audio is not None:
            data = await self._audio.feed(output.payload)
            chunks += self._data(data)
        if output.finished:
            chunks += await self._last()
        return chunks

    def _first(self) -> Delta:
        if self._audio is None:
            return Delta(role="assistant", content="")
        return Delta(role="assistant", audio=DeltaAudio(id=self._audio_id))

    def _words(self, output: OmniRequestOutput) -> Delta:
        if is_reasoning(output):
            return Delta(reasoning_content=output.text, reasoning=output.text)
        if self._audio is None:
            return Delta(content=output.text)
        return Delta(audio=DeltaAudio(id=self._audio_id, transcript=output.text))

    def _data(self, data: bytes) -> list[ChunkChoice]:
        if not data:
            return []
        return [self._chunk(Delta(audio=DeltaAudio(id=self._audio_id, data=base64_text(data))))]

    async def _last(self) -> list[ChunkChoice]:
        """The end of the audio, its expiry, and then the one finish reason."""
        chunks = list[ChunkChoice]()
        if self._audio is not None:
            chunks += self._data(await self._audio.finish())
            self._state.transcripts.keep(self._audio_id, self.result.text)
            expires_at = int(time.time()) + LIFETIME_S
            chunks.append(self._chunk(Delta(audio=DeltaAudio(id=self._audio_id, expires_at=expires_at))))
        result = self.result
        end = ChunkChoice(result.index, Delta(), result.finish, None, result.seed, result.shown_metrics)
        return [*chunks, end]

    def _chunk(self, delta: Delta, logprobs: list[TokenLogprob] | None = None) -> ChunkChoice:
        return ChunkChoice(self.result.index, delta, None, ChatLogprobs(logprobs) if logprobs else None)


class _Stream:
    """One streamed answer: chunks of all choices as they come, then usage if asked, then [DONE]."""

    def __init__(self, state: ServerState, exchange: Exchange, job: ChatJob) -> None:
        self._state, self._exchange, self._job = state, exchange, job
        options = job.body.stream_options
        self._include_usage = options is not None and options.include_usage
        results = [ChoiceResult(i, job.body.return_metrics, ask.id) for i, ask in enumerate(job.requests)]
        self._choices = [_ChoiceStream(state, result, job.audio_format) for result in results]

    async def run(self) -> None:
        exchange = self._exchange
        async with aclosing(choice_events(self._state.engine, self._job.requests, self._job.media)) as events:
            async for index, output in events:
                data = b"".join([self._event(choice) for choice in await self._choices[index].deltas(output)])
                await exchange.send_events(data, DONE)
        await exchange.end(self._usage_event() + DONE)

    def _event(self, choice: ChunkChoice) -> bytes:
        return event(self._wrap([choice], None if self._include_usage else UNSET))

    def _usage_event(self) -> bytes:
        if not self._include_usage:
            return b""
        results = [choice.result for choice in self._choices]
        return event(self._wrap([], usage_of(results, self._state.capabilities.text_stages, len(results))))

    def _wrap(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        job = self._job
        return ChatChunk(
            job.id,
            job.created,
            self._state.model,
            choices,
            system_fingerprint=self._state.fingerprint,
            usage=usage,
        )
