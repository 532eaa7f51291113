"""Routes of requests through the embedded pipeline, and what is refused before any stage sees it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import yaml

from omnistage.config.model import LimitsConfig, OmniConfig, RequestPlan
from omnistage.errors import RequestError
from omnistage.models.smol_speech import pipeline as module
from omnistage.models.smol_speech.pipeline import PIPELINE
from omnistage.models.smol_speech.request import SPOKEN_SYSTEM_PROMPT
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest

CONFIG = OmniConfig(
    model="smol-speech",
    model_path="",
    pipeline="smol-speech",
    variant="default",
    stages={},
    edges={},
    limits=LimitsConfig(max_audio_s=5),
)


def plan(media: dict[str, MultimodalPayload] | None = None, **fields: Any) -> RequestPlan:
    return PIPELINE.plan(OmniRequest(id="r", **fields), media or {}, CONFIG)


def audio(seconds: float = 1.0, rate: int = 16000) -> MultimodalPayload:
    return MultimodalPayload.of({"sample_rate": rate}, audio=np.zeros((1, int(seconds * rate)), np.float32))


SPOKEN_QUESTION = [{"role": "user", "content": [{"type": "text", "text": "Hear:"}, {"type": "audio", "media": "a"}]}]


def test_text_chat_needs_the_thinker_alone() -> None:
    route = plan(prompt="Hi", modalities=("text",))
    assert (route.stages, route.outputs) == (("thinker",), ("text",))
    assert route.params == {"thinker": {"messages": [{"role": "user", "content": "Hi"}]}}
    assert route.inputs == []


def test_a_spoken_answer_also_comes_as_text_and_is_asked_to_be_short() -> None:
    route = plan(prompt="Hi", voice="joe", params={"speed": 2})
    assert (route.stages, route.outputs) == (("thinker", "talker", "code2wav"), ("text", "audio"))
    assert route.params["talker"] == route.params["code2wav"] == {"voice": "joe", "speed": 2.0}
    assert route.params["thinker"]["messages"][0] == {"role": "system", "content": SPOKEN_SYSTEM_PROMPT}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_requests_own_system_message_is_kept(role: str) -> None:
    messages = [{"role": role, "content": "Rhyme."}, {"role": "user", "content": "Hi"}]
    route = plan(messages=messages, modalities=("audio",))
    assert [message["role"] for message in route.params["thinker"]["messages"]] == ["system", "user"]
    assert route.params["thinker"]["messages"][0]["content"] == "Rhyme."


def test_spoken_questions_go_through_the_listener_first() -> None:
    route = plan({"a": audio(), "unused": audio()}, messages=SPOKEN_QUESTION, modalities=("text",))
    assert route.stages == ("listener", "thinker")
    payload = route.inputs[0].payload
    assert (route.inputs[0].port, list(payload.tensors), payload.meta) == (
        "audio",
        ["audio.0"],
        {"sample_rates": [16000]},
    )


def test_recordings_keep_the_order_of_the_messages() -> None:
    messages = [{"role": "user", "content": [{"type": "audio", "media": key}]} for key in ("b", "a", "b")]
    route = plan({"a": audio(1.0), "b": audio(0.5)}, messages=messages)
    payload = route.inputs[0].payload
    assert [payload[f"audio.{index}"].shape[1] for index in range(3)] == [8000, 16000, 8000]


def test_speech_runs_talker_and_code2wav_on_the_clients_text() -> None:
    route = plan(task="speech", prompt="Say this.")
    assert (route.stages, route.outputs) == (("talker", "code2wav"), ("audio",))
    assert [(item.port, item.payload.meta) for item in route.inputs] == [("text", {"text": "Say this."})]
    assert route.params["talker"]["voice"] == "heart"


def test_transcription_runs_the_listener_alone() -> None:
    route = plan({"audio": audio()}, task="transcription", params={"language": "en", "prompt": "Names: Ada"})
    assert (route.stages, route.outputs) == (("listener",), ("transcript",))
    assert route.params["listener"]["prompt"] == "Names: Ada"


def test_completion_takes_text_or_tokens() -> None:
    assert plan(task="completion", prompt="Once").params == {"thinker": {"raw_prompt": "Once"}}
    tokens = plan(task="completion", params={"prompt_token_ids": [1, 2]})
    assert tokens.params == {"thinker": {"token_ids": [1, 2]}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"task": "image", "prompt": "x"}, "task"),
        ({"prompt": "x", "voice": "emma"}, "voice"),
        ({"prompt": "x", "modalities": ("image",)}, "modalities"),
        ({"prompt": "x", "modalities": ()}, "modalities"),
        ({"task": "completion", "prompt": "x", "modalities": ("audio",)}, "modalities"),
        ({"prompt": "x", "params": {"speed": 5}}, "speed"),
        ({"prompt": "x", "params": {"speed": "fast"}}, "speed"),
        ({"prompt": "x", "params": {"speed": True}}, "speed"),
        ({"prompt": "x", "params": {"speed": float("nan")}}, "speed"),
        ({"prompt": "x", "params": {"pitch": 1}}, "pitch"),
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "media": "a"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "audio", "media": "nowhere"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
        ({"task": "speech", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"task": "transcription"}, "file"),
        ({"task": "transcription", "prompt": "x"}, "prompt"),
        ({"task": "transcription", "params": {"language": "de"}}, "file"),
    ],
)
def test_a_bad_request_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan(**fields)
    assert caught.value.info.param == param


@pytest.mark.parametrize(
    ("name", "value"), [("language", "de"), ("temperature", 2.0), ("timestamps", 1), ("prompt", 3)]
)
def test_bad_transcription_parameters_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        plan({"audio": audio()}, task="transcription", params={name: value})
    assert caught.value.info.param == name


def test_more_audio_than_the_limit_is_refused() -> None:
    with pytest.raises(RequestError, match=r"5\.5 s of audio"):
        plan({"audio": audio(5.5)}, task="transcription")


def test_media_without_a_sample_rate_is_refused() -> None:
    broken = MultimodalPayload.of(audio=np.zeros((1, 10), np.float32))
    with pytest.raises(RequestError, match="sample rate"):
        plan({"audio": broken}, task="transcription")


def test_declaring_the_pipeline_imports_no_torch() -> None:
    code = f"import sys, {module.__name__}; sys.exit('torch' in sys.modules or 'onnxruntime' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_deploy_file_names_only_stages_and_options_that_exist() -> None:
    file = module.__file__.replace("pipeline.py", "deploy.yaml")
    with open(file, encoding="utf-8") as stream:
        deploy = yaml.safe_load(stream)
    stages = {stage.name: stage for stage in PIPELINE.variants["default"].stages}
    assert deploy["pipeline"] == PIPELINE.name
    assert set(deploy["stages"]) == set(stages)
    names = {edge.name for edge in PIPELINE.variants["default"].edges}
    assert set(deploy["edges"]) <= names
