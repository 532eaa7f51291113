"""echo3: AR -> AR -> wave with closed-form weights. The thinker repeats the prompt, the talker speaks it.

The right waveform is known sample for sample (`closed_form`). No torch anywhere, so it starts in a blink.
"""

from __future__ import annotations

from omnistage.config.model import (
    ClientInput,
    EdgeSpec,
    OmniConfig,
    OptionSpec,
    PipelineConfig,
    RequestPlan,
    StageSpec,
    Variant,
)
from omnistage.errors import RequestError
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest, prompt_of
from omnistage.testing.closed_form import SAMPLE_RATE

VOICES = ("echo",)
MAX_CHUNK_FRAMES = 1 << 14
_DELAY = OptionSpec(type="float", default=0.0, minimum=0.0, maximum=10.0, help="seconds that each step sleeps")
_AR_DEFAULTS = {"kv_memory_mb": 1, "max_num_seqs": 64, "arena_mb": 1}

_STAGES = (
    StageSpec(
        name="thinker",
        kind="ar",
        component="omnistage.testing.echo3_stages:thinker",
        outputs={"text": "text"},
        options={"step_delay_s": _DELAY},
        defaults=_AR_DEFAULTS,
        objective="ttft",
        torch=False,
    ),
    StageSpec(
        name="talker",
        kind="ar",
        component="omnistage.testing.echo3_stages:talker",
        inputs={"text": "text"},
        outputs={"codes": "codes"},
        options={"step_delay_s": _DELAY},
        defaults=_AR_DEFAULTS,
        objective="ttfp",
        torch=False,
    ),
    StageSpec(
        name="wave",
        kind="generation",
        component="omnistage.testing.echo3_stages:wave",
        inputs={"codes": "codes"},
        outputs={"audio": "audio"},
        options={
            "step_delay_s": _DELAY,
            "chunk_frames": OptionSpec(type="int", default=4, minimum=1, help="codes per audio chunk"),
        },
        defaults={"max_num_seqs": 64, "arena_mb": 4},
        objective="ttfp",
        torch=False,
    ),
)
_EDGES = (
    EdgeSpec("client.text", "talker.text"),
    EdgeSpec("thinker.text", "client.text"),
    EdgeSpec("thinker.text", "talker.text"),
    EdgeSpec("talker.codes", "wave.codes"),
    EdgeSpec("wave.audio", "client.audio"),
)


def plan(request: OmniRequest, media: dict[str, MultimodalPayload], config: OmniConfig) -> RequestPlan:
    """chat and completion repeat the prompt (text, audio or both); speech speaks `prompt`.

    The parameter `chunk_frames` takes the place of the wave's own setting for one request.
    """
    if media:
        raise RequestError("echo3 takes text only", param="messages")
    if request.voice not in (None, *VOICES):
        raise RequestError(f"no voice {request.voice!r}; voices are {', '.join(VOICES)}", param="voice")
    text = prompt_of(request)
    wave = _wave_params(request)
    if request.task == "speech":
        spoken = ClientInput(port="text", payload=MultimodalPayload.text(text))
        return RequestPlan(stages=("talker", "wave"), params=wave, inputs=[spoken], outputs=("audio",))
    modalities = request.modalities if request.modalities is not None else ("text", "audio")
    unknown = set(modalities) - {"text", "audio"}
    if unknown or not modalities:
        raise RequestError(f"no modality {sorted(unknown)}; echo3 gives text and audio", param="modalities")
    stages = ("thinker", "talker", "wave") if "audio" in modalities else ("thinker",)
    return RequestPlan(stages=stages, params=wave | {"thinker": {"prompt": text}}, outputs=tuple(modalities))


def _wave_params(request: OmniRequest) -> dict[str, dict[str, int]]:
    frames = request.params.get("chunk_frames")
    if frames is None:
        return {}
    if not isinstance(frames, int) or not 0 < frames <= MAX_CHUNK_FRAMES:
        raise RequestError(f"chunk_frames must be 1..{MAX_CHUNK_FRAMES}", param="chunk_frames")
    return {"wave": {"chunk_frames": frames}}


PIPELINE = PipelineConfig(
    name="echo3",
    variants={"default": Variant(stages=_STAGES, edges=_EDGES)},
    plan=plan,
    tasks=("chat", "completion", "speech"),
    voices=VOICES,
    sample_rate=SAMPLE_RATE,
    description="closed-form test pipeline: repeats the prompt as text and tones",
)
