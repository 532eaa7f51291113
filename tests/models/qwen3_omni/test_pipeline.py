from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnistage.config.model import RequestPlan
from omnistage.config.registry import pipeline_for_architecture
from omnistage.errors import ConfigError, RequestError
from omnistage.models.qwen3_omni.pipeline import plan, variant_for
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from tests.models.qwen3_omni.stages import config_of

SOUND = MultimodalPayload.of({"sample_rate": 16000}, audio=np.zeros((1, 1600), np.float32))
CLIP = MultimodalPayload.of({"fps": 24.0}, video=np.zeros((4, 32, 32, 3), np.uint8))
FRAMES = MultimodalPayload.of(video=np.zeros((4, 32, 32, 3), np.uint8))
PICTURE = MultimodalPayload.of(image=np.zeros((32, 32, 3), np.uint8))
MEDIA = {"sound": SOUND, "other": SOUND, "clip": CLIP, "frames": FRAMES, "picture": PICTURE}


def routed(variant: str = "default", **fields: Any) -> RequestPlan:
    return plan(OmniRequest(id="r", **({"prompt": "Hi"} | fields)), MEDIA, config_of("", variant))


def shown(*parts: dict[str, Any], **params: Any) -> RequestPlan:
    message = {"role": "user", "content": list(parts)}
    request = OmniRequest(id="r", messages=[message], params=params)
    return plan(request, MEDIA, config_of(""))


def part(kind: str, key: str) -> dict[str, Any]:
    return {"type": kind, "media": key}


HEARD = {"use_audio_in_video": True}


def test_all_stages_speak_unless_text_only_is_asked_for() -> None:
    assert routed().stages == ("thinker", "talker", "code2wav")
    assert routed().outputs == ("text", "audio")
    silent = routed(modalities=("text",), params={"return_codes": True})
    assert (silent.stages, silent.outputs) == (("thinker",), ("text",))


def test_speech_alone_may_be_asked_for() -> None:
    assert routed(modalities=("audio",)).outputs == ("audio",)


def test_codes_go_to_the_client_on_demand() -> None:
    assert routed(params={"return_codes": True}).outputs == ("text", "audio", "codes")


def test_a_deployment_without_talker_writes_only() -> None:
    assert routed("thinker").stages == ("thinker",)
    with pytest.raises(RequestError, match="no talker") as error:
        routed("thinker", modalities=("text", "audio"))
    assert error.value.info.param == "modalities"


def test_the_checkpoint_decides_whether_there_is_a_talker(tmp_path: Path) -> None:
    for content, variant in (
        ({"talker_config": {}}, "default"),
        ({"talker_config": {}, "enable_audio_output": False}, "thinker"),
        ({}, "thinker"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert variant_for(str(tmp_path)) == variant
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        variant_for(str(tmp_path))


def test_the_architecture_names_the_pipeline() -> None:
    assert pipeline_for_architecture("Qwen3OmniMoeForConditionalGeneration") == "qwen3_omni"


def test_media_keep_the_order_of_the_messages() -> None:
    made = shown(part("image", "picture"), {"type": "text", "text": "and"}, part("audio", "sound"))
    content = made.params["thinker"]["messages"][0]["content"]
    assert content == [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "audio"}]
    payload = made.inputs[0].payload
    assert [item["kind"] for item in payload.meta["items"]] == ["image", "audio"]
    assert payload["0"] is PICTURE["image"]


def test_a_heard_video_takes_the_next_sound_of_its_message() -> None:
    made = shown(part("audio", "other"), part("video", "clip"), part("audio", "sound"), mm_processor_kwargs=HEARD)
    content = made.params["thinker"]["messages"][0]["content"]
    assert content == [{"type": "audio"}, {"type": "video"}]
    items = made.inputs[0].payload.meta["items"]
    assert [(item["kind"], item.get("sounds")) for item in items] == [("audio", None), ("video", None), ("audio", 0)]


def test_a_heard_video_prefers_its_own_sound_track() -> None:
    own = MultimodalPayload.of({"fps": 24.0, "sample_rate": 8000}, video=CLIP["video"], audio=SOUND["audio"])
    messages = [{"role": "user", "content": [part("video", "own"), part("audio", "sound")]}]
    request = OmniRequest(id="r", messages=messages, params={"mm_processor_kwargs": HEARD})
    made = plan(request, MEDIA | {"own": own}, config_of(""))
    items = made.inputs[0].payload.meta["items"]
    assert [(item["kind"], item.get("rate")) for item in items] == [
        ("video", 24.0),
        ("audio", 8000.0),
        ("audio", 16000.0),
    ]


def test_a_video_without_sound_cannot_be_heard() -> None:
    with pytest.raises(RequestError, match="no sound") as error:
        shown(part("audio", "sound"), part("video", "clip"), mm_processor_kwargs=HEARD)
    assert error.value.info.param == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("key", "params", "fps"),
    [("clip", {}, 2.0), ("frames", {}, 1.0), ("clip", {"mm_processor_kwargs": {"fps": 4}}, 4.0)],
)
def test_videos_are_looked_at_twice_a_second_bare_frames_once(key: str, params: dict[str, Any], fps: float) -> None:
    assert shown(part("video", key), **params).inputs[0].payload.meta["fps"] == fps


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ("image",)}, "modalities"),
        ({"modalities": ()}, "modalities"),
        ({"raw_prompt": "x"}, "raw_prompt"),
        ({"prompt": None}, "messages"),
        ({"params": {"speed": 2}}, "speed"),
        ({"params": {"return_codes": "yes"}}, "return_codes"),
        ({"params": {"mm_processor_kwargs": {"fps": 0}}}, "mm_processor_kwargs"),
        ({"params": {"mm_processor_kwargs": {"max_pixels": 9}}}, "mm_processor_kwargs"),
        ({"prompt": None, "messages": []}, "messages"),
        ({"prompt": None, "messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        ({"prompt": None, "messages": [{"role": "user"}]}, "messages[0]"),
        ({"prompt": "see <|image_pad|>"}, "messages[0]"),
        ({"prompt": None, "messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0]"),
        ({"prompt": None, "messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0]"),
        ({"prompt": None, "messages": [{"role": "user", "content": [part("audio", "gone")]}]}, "messages"),
        ({"prompt": None, "messages": [{"role": "user", "content": [part("audio", "picture")]}]}, "messages"),
    ],
    ids=str,
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as error:
        routed(**fields)
    assert error.value.info.param == param


@pytest.mark.slow
def test_the_pipeline_imports_no_torch() -> None:
    code = "import sys, omnistage.models.qwen3_omni.pipeline; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
