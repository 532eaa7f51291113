"""Parameters, prompts and geometry without torch: what is refused, what is completed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnistage.errors import ConfigError, RequestError
from omnistage.models.cosmos3.action import canvas_for
from omnistage.models.cosmos3.ask import Ask, Limits, resolve
from omnistage.models.cosmos3.checkpoint import Checkpoint, read_checkpoint
from omnistage.models.cosmos3.prompt import messages_of
from omnistage.models.cosmos3.request import outputs_of, read_request
from omnistage.models.cosmos3.transfer_plan import plan_transfer
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest

BASE = Checkpoint(
    folder=Path(),
    transformer={},
    scheduler={"_class_name": "UniPCMultistepScheduler"},
    spatial=16,
    temporal=4,
    channels=48,
    patch=2,
    action_dim=64,
    sound_dim=64,
    sound_rate=48_000,
    sound_hop=1920,
    sound_latent_fps=25.0,
    distilled_sigmas=(),
    default_steps=35,
    default_system_prompt=True,
    native_schedule=False,
    wants_safety_checker=False,
)
DISTILLED = replace(BASE, distilled_sigmas=(0.9, 0.5), action_dim=0, sound_dim=0)
LIMITS = Limits(max_frames=400, max_pixels=1 << 22)
ROBOT = {"mode": "policy", "chunk_size": 16, "domain_name": "umi", "resolution_tier": 256}
PICTURE = {"image": (32, 48, 3)}
CONTROL = {"control_edge": (93, 32, 48, 3)}


def ask(checkpoint: Checkpoint = BASE, **params: Any) -> Ask:
    return resolve({"prompt": "p"} | params, checkpoint, LIMITS)


def test_defaults_are_the_published_ones() -> None:
    made = ask()
    assert (made.frames, made.height, made.width, made.fps, made.steps, made.guidance) == (189, 720, 1280, 24, 35, 6)
    assert (made.latent_frames, made.latent_height, made.latent_width) == (48, 45, 80)
    assert made.rows(patch=2) == 2 * 44160


def test_sound_has_the_latents_of_its_duration() -> None:
    assert ask(enable_sound=True).sound_latents == 197


def test_guidance_of_one_has_one_branch_and_any_other_two() -> None:
    assert ask(guidance_scale=1.0).branches == ("cond",)
    assert ask(guidance_scale=0.5).branches == ("cond", "uncond")


def test_transfer_has_up_to_three_branches() -> None:
    assert ask(media_shapes=CONTROL, control_guidance=2.0).branches == ("cond", "bare", "uncond")
    assert ask(media_shapes=CONTROL, guidance_scale=0.5).branches == ("cond",)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"hight": 720}, "hight"),
        ({"height": 721}, "height"),
        ({"width": 8}, "width"),
        ({"size": "12"}, "size"),
        ({"size": "64x64", "height": 64}, "size"),
        ({"size": "65536x65536"}, "size"),
        ({"num_frames": 0}, "num_frames"),
        ({"num_frames": 401}, "num_frames"),
        ({"num_frames": "many"}, "num_frames"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"fps": 0}, "fps"),
        ({"guidance_scale": 1e9}, "guidance_scale"),
        ({"condition_video_keep": "middle"}, "condition_video_keep"),
        ({"media_shapes": PICTURE, "num_frames": 1}, "image"),
        ({"media_shapes": PICTURE | {"video": (5, 32, 48, 3)}}, "video"),
        (
            {"media_shapes": {"video": (5, 32, 48, 3)}, "num_frames": 5, "condition_frame_indexes_vision": [2]},
            "condition_frame_indexes_vision",
        ),
        ({"num_frames": 1, "enable_sound": True}, "enable_sound"),
        ({"action": {"mode": "dance", "chunk_size": 4, "domain_name": "umi"}}, "action.mode"),
        ({"action": ROBOT}, "action"),
        ({"action": ROBOT | {"domain_name": "libero"}, "media_shapes": PICTURE}, "action"),
        ({"action": ROBOT | {"resolution_tier": 300}, "media_shapes": PICTURE}, "action"),
        ({"action": ROBOT | {"view_point": "bird"}, "media_shapes": PICTURE}, "action"),
        ({"action": ROBOT, "media_shapes": PICTURE, "num_frames": 17}, "num_frames"),
        ({"action": ROBOT | {"mode": "inverse_dynamics"}, "media_shapes": PICTURE}, "action"),
        ({"action": ROBOT | {"mode": "forward_dynamics"}, "media_shapes": PICTURE}, "action"),
        ({"action": ROBOT, "media_shapes": PICTURE | {"actions": (4, 10)}}, "action"),
        (
            {"action": ROBOT | {"mode": "forward_dynamics"}, "media_shapes": PICTURE | {"actions": (4, 9)}},
            "action",
        ),
        ({"control_guidance": 2.0}, "control_guidance"),
        ({"num_video_frames_per_chunk": 9}, "num_video_frames_per_chunk"),
        (
            {"media_shapes": CONTROL, "num_video_frames_per_chunk": 9, "num_conditional_frames": 9},
            "num_conditional_frames",
        ),
        ({"media_shapes": CONTROL | {"video": (5, 32, 48, 3)}}, "num_first_chunk_conditional_frames"),
        ({"media_shapes": CONTROL, "enable_sound": True}, "control_videos"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(params: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as error:
        ask(**params)
    assert error.value.info.param == named


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"num_inference_steps": 4}, "num_inference_steps"),
        ({"guidance_scale": 6.0}, "guidance_scale"),
        ({"negative_prompt": "ugly"}, "negative_prompt"),
        ({"flow_shift": 3.0}, "flow_shift"),
        ({"media_shapes": CONTROL}, "action"),
        ({"enable_sound": True}, "enable_sound"),
    ],
)
def test_a_distilled_checkpoint_refuses_what_is_built_in(params: dict[str, Any], named: str) -> None:
    assert ask(DISTILLED).steps == 2
    with pytest.raises(RequestError) as error:
        ask(DISTILLED, **params)
    assert error.value.info.param == named


def test_wide_domains_are_refused_by_a_narrow_action_head() -> None:
    with pytest.raises(RequestError, match="57 channels"):
        ask(action=ROBOT | {"domain_name": "hand_pose"}, media_shapes=PICTURE, checkpoint=replace(BASE, action_dim=12))


def test_templates_say_size_and_duration_and_the_negative_says_not() -> None:
    texts = messages_of(ask(prompt="A cat.", num_frames=48, size="640x480"))
    assert texts.positive[1]["content"] == (
        "A cat. The video is 2.0 seconds long and is of 24 FPS. This video is of 480x640 resolution."
    )
    assert texts.negative[1]["content"] == (
        "The video is not 2.0 seconds long and is not of 24 FPS. This video is not of 480x640 resolution."
    )
    assert texts.positive[0]["content"] == "You are a helpful assistant who will generate videos from a give prompt."


def test_an_image_has_no_duration() -> None:
    texts = messages_of(ask(num_frames=1, size="64x64", use_system_prompt=False))
    assert [message["content"] for message in texts.positive] == ["p. This image is of 64x64 resolution."]


def test_action_caption_carries_canvas_time_and_view() -> None:
    made = ask(action=ROBOT | {"view_point": "wrist_view"}, media_shapes=PICTURE, fps=5.0, prompt="Lift it")
    fields = json.loads(messages_of(made).positive[1]["content"])
    assert fields["actions"] == [{"time": "0:00-0:03", "description": "Lift it."}]
    assert (fields["duration"], fields["fps"], fields["aspect_ratio"]) == ("3s", 5.0, "16,9")
    assert fields["resolution"] == {"H": 192, "W": 320}
    assert "wrist-mounted" in fields["cinematography"]["framing"]
    assert messages_of(made).negative[1]["content"] == ""


def test_canvas_only_shrinks_content() -> None:
    assert canvas_for(32, 48, 256, 16) == (192, 320, 32, 48)
    assert canvas_for(1000, 1000, 256, 16) == (256, 256, 256, 256)
    with pytest.raises(RequestError, match="16 pixels"):
        canvas_for(8, 48, 256, 16)


@pytest.mark.parametrize(
    ("total", "per_chunk", "chunk", "chunks"), [(93, None, 93, 1), (93, 33, 33, 3), (1, None, 1, 1)]
)
def test_transfer_chunks_cover_the_output(total: int, per_chunk: int | None, chunk: int, chunks: int) -> None:
    made = plan_transfer(
        hints=("edge",),
        total_frames=total,
        frames_per_chunk=per_chunk,
        overlap=1,
        first_overlap=0,
        temporal=4,
        guidance=(1.0, None, None),
    )
    assert (made.chunk_frames, made.chunks) == (chunk, chunks)
    covered = set[int]()
    for index in range(made.chunks):
        covered |= set(range(*made.window(index)))
    assert covered == set(range(total))


def request(**params: Any) -> OmniRequest:
    return OmniRequest(id="a", prompt="p", params=params)


def test_media_become_ports_with_their_shapes() -> None:
    media = {"image0": MultimodalPayload.of(image=np.zeros((8, 9, 3), np.uint8))}
    rows = [[0.0] * 10] * 3
    reading = read_request(
        request(action={"mode": "forward_dynamics", "image": {"media": "image0"}, "raw_actions": rows}), media
    )
    assert reading.params["media_shapes"] == {"image": (8, 9, 3), "actions": (3, 10)}
    assert reading.params["action"] == {"mode": "forward_dynamics"}
    assert [item.port for item in reading.inputs] == ["image", "actions"]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"image": "file.png"}, "image"),
        ({"image": {"media": "gone"}}, "image"),
        ({"video": {"media": "image0"}}, "video"),
        ({"control_videos": {"sketch": {"media": "image0"}}}, "control_videos"),
        ({"control_videos": {}}, "control_videos"),
        ({"action": {"raw_actions": [["x"]]}}, "action"),
        ({"action": {"raw_actions": [[1.0], [1.0, 2.0]]}}, "action"),
    ],
)
def test_media_of_a_wrong_kind_are_refused_by_name(params: dict[str, Any], named: str) -> None:
    media = {"image0": MultimodalPayload.of(image=np.zeros((8, 9, 3), np.uint8))}
    with pytest.raises(RequestError) as error:
        read_request(request(**params), media)
    assert error.value.info.param == named


def test_outputs_follow_the_mode_and_others_are_refused() -> None:
    plain = request()
    assert outputs_of(plain, ask(num_frames=1), latents=False) == ("image",)
    assert outputs_of(plain, ask(enable_sound=True), latents=True) == ("video", "audio", "latents", "audio_latents")
    policy = ask(action=ROBOT, media_shapes=PICTURE)
    assert outputs_of(plain, policy, latents=False) == ("video", "action")
    with pytest.raises(RequestError, match="no audio"):
        outputs_of(OmniRequest(id="a", prompt="p", modalities=("audio",)), policy, latents=False)


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_index\.json"):
        read_checkpoint(tmp_path)


START = (1, 48, 3, 2, 3)
SIZES: dict[str, Any] = {"height": 32, "width": 48, "num_frames": 9}


def test_latents_to_start_from_have_the_shapes_of_the_request() -> None:
    shapes = {"start_latents": START, "start_sound_latents": (64, 10)}
    assert ask(**SIZES, enable_sound=True, media_shapes=shapes).sound_latents == 10


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (SIZES | {"media_shapes": {"start_latents": (1, 48, 3, 3, 2)}}, "latents"),
        (SIZES | {"media_shapes": {"start_sound_latents": (64, 10)}}, "sound_latents"),
        (SIZES | {"media_shapes": {"start_action_latents": (16, 64)}}, "action_latents"),
        ({"media_shapes": CONTROL | {"start_latents": START}}, "latents"),
        ({"action": ROBOT, "media_shapes": PICTURE | {"start_action_latents": (16, 10)}}, "action_latents"),
    ],
)
def test_other_latents_to_start_from_are_refused(params: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as error:
        ask(**params)
    assert error.value.info.param == named
