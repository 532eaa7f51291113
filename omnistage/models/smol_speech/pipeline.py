"""The embedded pipeline: its stages, its graph, and how each kind of request runs through it. Torch-free."""

from __future__ import annotations

from typing import Any

from omnistage.config.model import (
    ClientInput,
    EdgeSpec,
    OmniConfig,
    OptionSpec,
    PipelineConfig,
    RequestPlan,
    StageSpec,
    TextMarkup,
    Variant,
)
from omnistage.errors import RequestError
from omnistage.models.smol_speech.footprint import footprint
from omnistage.models.smol_speech.request import conversation, transcription_params, used_media, validate
from omnistage.payload import MultimodalPayload, Tensor
from omnistage.request import OmniRequest

_PACKAGE = "omnistage.models.smol_speech"
VOICES = ("heart", "joe")
SAMPLE_RATE = 24000

LISTENER = StageSpec(
    name="listener",
    kind="generation",
    component=f"{_PACKAGE}.listener:create",
    inputs={"audio": "audio"},
    outputs={"transcript": "text"},
    objective="ttft",
    defaults={"max_num_seqs": 8},
)
THINKER = StageSpec(
    name="thinker",
    kind="ar",
    component=f"{_PACKAGE}.thinker:create",
    inputs={"transcript": "text"},
    outputs={"text": "text"},
    objective="ttft",
    sampling={"temperature": 0.2, "top_p": 0.9, "max_tokens": 512},
    capabilities=frozenset({"text", "logprobs", "seed", "int4", "weight_layout", "structured"}),
    markup=TextMarkup(tool_format="hermes"),
)
TALKER = StageSpec(
    name="talker",
    kind="generation",
    component=f"{_PACKAGE}.talker:create",
    inputs={"text": "text"},
    outputs={"frames": "frames"},
    objective="ttfp",
    # Clauses are not computed together, so each goes on as soon as it is done.
    defaults={"max_num_seqs": 1},
    options={
        "clause_growth": OptionSpec(
            "int", 24, 0, 1000, help="characters by which the shortest clause grows with each clause of an answer"
        ),
        "clause_chars": OptionSpec("int", 72, 1, 1000, help="most that the shortest clause grows to, in characters"),
        "max_clause_chars": OptionSpec("int", 240, 16, 1000, help="longest clause, in characters"),
    },
    torch=False,
)
CODE2WAV = StageSpec(
    name="code2wav",
    kind="generation",
    component=f"{_PACKAGE}.code2wav:create",
    inputs={"frames": "frames"},
    outputs={"audio": "audio"},
    objective="ttfp",
    options={
        "first_chunk_frames": OptionSpec("int", 12, 1, 4096, help="frames of 12.5 ms in a request's first packet"),
        "chunk_frames": OptionSpec("int", 24, 1, 4096, help="frames of 12.5 ms in every other packet"),
    },
)
EDGES = tuple(
    EdgeSpec(source, target)
    for source, target in (
        ("client.audio", "listener.audio"),
        ("listener.transcript", "thinker.transcript"),
        ("listener.transcript", "client.transcript"),
        ("thinker.text", "client.text"),
        ("thinker.text", "talker.text"),
        ("client.text", "talker.text"),
        ("talker.frames", "code2wav.frames"),
        ("code2wav.audio", "client.audio"),
    )
)


def plan(request: OmniRequest, media: dict[str, MultimodalPayload], config: OmniConfig) -> RequestPlan:
    """The route of a request. Raises RequestError naming the field that is at fault."""
    validate(request, VOICES)
    match request.task:
        case "chat":
            return _plan_chat(request, media, config)
        case "completion":
            return _plan_completion(request)
        case "speech":
            return _plan_speech(request)
        case "transcription":
            return _plan_transcription(request, media, config)
    raise RequestError(f"task {request.task!r} is not served; known: {', '.join(PIPELINE.tasks)}", param="task")


def _plan_chat(request: OmniRequest, media: dict[str, MultimodalPayload], config: OmniConfig) -> RequestPlan:
    speaks = request.modalities is None or "audio" in request.modalities
    prompt = _chat_prompt(request, speaks)
    keys = used_media(prompt.get("messages", []), media)
    stages: tuple[str, ...] = ("thinker",)
    outputs: tuple[str, ...] = ("text",)
    params: dict[str, dict[str, Any]] = {"thinker": prompt}
    inputs: list[ClientInput] = []
    if keys:
        stages = ("listener", *stages)
        inputs.append(ClientInput(port="audio", payload=_joined_audio([media[key] for key in keys], config)))
    if speaks:
        stages += ("talker", "code2wav")
        outputs += ("audio",)
        params |= {stage: _speech_params(request) for stage in ("talker", "code2wav")}
    return RequestPlan(stages=stages, params=params, inputs=inputs, outputs=outputs)


def _chat_prompt(request: OmniRequest, speaks: bool) -> dict[str, Any]:
    if request.raw_prompt is not None:
        return {"raw_prompt": request.raw_prompt}
    return {"messages": conversation(request, speaks)}


def _plan_completion(request: OmniRequest) -> RequestPlan:
    if "prompt_token_ids" in request.params:
        prompt: dict[str, Any] = {"token_ids": request.params["prompt_token_ids"]}
    else:
        prompt = {"raw_prompt": request.prompt if request.raw_prompt is None else request.raw_prompt}
    return RequestPlan(stages=("thinker",), params={"thinker": prompt}, outputs=("text",))


def _plan_speech(request: OmniRequest) -> RequestPlan:
    text = request.prompt if request.raw_prompt is None else request.raw_prompt
    return RequestPlan(
        stages=("talker", "code2wav"),
        params={stage: _speech_params(request) for stage in ("talker", "code2wav")},
        inputs=[ClientInput(port="text", payload=MultimodalPayload.text(text or ""))],
        outputs=("audio",),
    )


def _plan_transcription(request: OmniRequest, media: dict[str, MultimodalPayload], config: OmniConfig) -> RequestPlan:
    if len(media) != 1:
        raise RequestError(f"a transcription takes one audio, not {len(media)}", param="file")
    return RequestPlan(
        stages=("listener",),
        params={"listener": transcription_params(request.params)},
        inputs=[ClientInput(port="audio", payload=_joined_audio(list(media.values()), config))],
        outputs=("transcript",),
    )


def _speech_params(request: OmniRequest) -> dict[str, Any]:
    return {"voice": request.voice or VOICES[0], "speed": float(request.params.get("speed", 1.0))}


def _joined_audio(parts: list[MultimodalPayload], config: OmniConfig) -> MultimodalPayload:
    """One payload with tensors "audio.0", "audio.1", ... and their rates, in order."""
    tensors: dict[str, Tensor] = {}
    rates: list[int] = []
    seconds = 0.0
    for index, part in enumerate(parts):
        if "audio" not in part.tensors or not isinstance(part.meta.get("sample_rate"), int):
            raise RequestError("a spoken part must be audio with a sample rate", param="messages")
        tensors[f"audio.{index}"] = part.tensors["audio"]
        rates.append(part.meta["sample_rate"])
        seconds += part["audio"].shape[-1] / rates[-1]
    if seconds > config.limits.max_audio_s:
        raise RequestError(
            f"the request holds {seconds:.1f} s of audio, more than the limit of {config.limits.max_audio_s} s",
            param="audio",
        )
    return MultimodalPayload(tensors, {"sample_rates": rates})


PIPELINE = PipelineConfig(
    name="smol-speech",
    variants={"default": Variant(stages=(LISTENER, THINKER, TALKER, CODE2WAV), edges=EDGES)},
    plan=plan,
    tasks=("chat", "completion", "speech", "transcription"),
    voices=VOICES,
    default_model="smol-speech",
    sample_rate=SAMPLE_RATE,
    description="Whisper tiny.en listens, SmolLM2-135M thinks, the voices heart (hibari) and joe (Piper) speak",
    footprint=footprint,
)
