"""From client requests to plans: defaults of the checkpoint, what deployments can do, what is refused and by which
name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnistage.config.model import RequestPlan
from omnistage.config.resolve import resolve_config
from omnistage.errors import ConfigError, RequestError
from omnistage.models.hunyuan_image3 import pipeline
from omnistage.models.hunyuan_image3.ask import Ask, read_ask
from omnistage.models.hunyuan_image3.checkpoint import read_checkpoint
from omnistage.models.hunyuan_image3.layout import Part, Turn
from omnistage.models.hunyuan_image3.pipeline import plan
from omnistage.models.hunyuan_image3.system_prompts import system_prompt_of
from omnistage.payload import MultimodalPayload
from omnistage.request import OmniRequest
from tests.models.hunyuan_image3.harness import FOLDER, config, submission

PROMPTS = '''
t2i_system_prompt_en_vanilla = """
Draw plainly.
"""
t2i_system_prompt_en_recaption = """Describe."""
t2i_system_prompt_en_think_recaption = """Think, then describe."""
unified_system_prompt_en = """ Do it all. """
t2i_system_prompts = {"en_vanilla": [t2i_system_prompt_en_vanilla]}
raise SystemExit("this file must not be run")
'''


def planned(
    ask: dict[str, Any],
    variant: str = "ar_dit",
    modalities: tuple[str, ...] | None = None,
    task: str = "image",
    folder: Path = FOLDER,
    overrides: dict[str, Any] | None = None,
) -> RequestPlan:
    request, media = submission("r", ask, modalities, task)
    return plan(request, media, config(variant, folder, **(overrides or {})))


def ask_of(found: RequestPlan) -> Ask:
    return read_ask(found.params[found.stages[-1]])


def test_a_picture_is_thought_about_as_the_checkpoint_says() -> None:
    found = planned({"prompt": "a cat"})
    ask = ask_of(found)
    assert found.stages == ("ar", "dit")
    assert (ask.task, ask.size, ask.steps, ask.guidance, ask.flow_shift) == ("think_recaption", None, 4, 2.5, 3.0)
    assert (ask.template, ask.drop_think, ask.system, ask.handover) == ("instruct", False, None, True)
    assert found.outputs == ("text", "image")


def test_request_values_beat_those_of_the_checkpoint() -> None:
    found = planned(
        {
            "prompt": "a cat", "bot_task": "recaption", "size": "64x128", "num_inference_steps": 7, "flow_shift": 1.5,
            "guidance_scale": 0.0, "sequence_template": "pretrain", "drop_think": True, "system_prompt": " Sys ",
        }
    )  # fmt: skip
    ask = ask_of(found)
    assert (ask.task, ask.size, ask.steps, ask.guidance, ask.flow_shift) == ("recaption", (128, 64), 7, 0.0, 1.5)
    assert (ask.template, ask.drop_think, ask.system) == ("pretrain", True, "Sys")


@pytest.mark.parametrize(
    ("ask", "variant", "stages", "task"),
    [
        ({"bot_task": "image", "size": "64x64"}, "ar_dit", ("dit",), ""),
        ({"bot_task": "image"}, "ar_dit", ("ar", "dit"), "ratio"),
        ({"bot_task": "img_ratio"}, "ar_dit", ("ar", "dit"), "ratio"),
        ({"height": 64, "width": 64, "bot_task": "think"}, "ar_dit", ("ar", "dit"), "think"),
        ({}, "dit", ("dit",), ""),
        ({"size": "64x64"}, "dit", ("dit",), ""),
    ],
)
def test_route_of_a_picture(ask: dict[str, Any], variant: str, stages: tuple[str, ...], task: str) -> None:
    found = planned({"prompt": "a cat"} | ask, variant)
    assert (found.stages, ask_of(found).task) == (stages, task)


def test_a_picture_without_size_or_text_stage_is_a_square() -> None:
    assert ask_of(planned({"prompt": "a cat"}, "dit")).size == (256, 256)


def test_chat_answers_in_text_and_draws_when_asked() -> None:
    said = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]}
    found = planned(said, task="chat", modalities=("text",))
    assert (found.stages, found.outputs, ask_of(found).task) == (("ar",), ("text",), "answer")
    found = planned(said, task="chat", modalities=("text", "image"))
    assert (found.stages, ask_of(found).task, ask_of(found).system) == (("ar", "dit"), "think_recaption", "S")
    assert planned({"prompt": "q", "bot_task": "recaption"}, "ar", task="chat").stages == ("ar",)


def test_latents_come_beside_a_picture_and_ask_for_none() -> None:
    assert planned({"prompt": "q", "return_latents": True}, modalities=("text",), task="chat").outputs == ("text",)
    assert planned({"prompt": "q", "return_latents": True}).outputs == ("text", "image", "latents")
    assert planned({"prompt": "q"}, modalities=("latents",)).stages == ("ar", "dit")


@pytest.mark.parametrize(
    ("variant", "bot_task", "outputs", "stages"),
    [
        ("ar_dit", None, ("text", "image"), ("ar", "dit")),
        ("dit", None, ("text", "image"), ("dit",)),
        ("ar", None, ("text",), ("ar",)),
        ("ar", "think", ("text",), ("ar",)),
    ],
)
@pytest.mark.parametrize("task", ["image", "chat"])
def test_a_request_that_names_no_modality_gets_all_that_the_deployment_gives(
    task: str, variant: str, bot_task: str | None, outputs: tuple[str, ...], stages: tuple[str, ...]
) -> None:
    found = planned({"prompt": "a cat"} | ({"bot_task": bot_task} if bot_task else {}), variant, None, task)
    assert (found.outputs, found.stages) == (outputs, stages)


def test_an_answer_is_text_alone() -> None:
    found = planned({"prompt": "q", "bot_task": "auto"}, task="chat")
    assert (found.outputs, found.stages, ask_of(found).task) == (("text",), ("ar",), "answer")


def test_text_about_a_picture_of_automatic_size_leads_to_the_size() -> None:
    for ask, chooses in (({}, False), ({"size": "auto"}, True), ({"size": "64x64"}, False)):
        found = ask_of(planned({"prompt": "a", "bot_task": "think_recaption"} | ask, "ar", task="chat"))
        assert found.chooses_size is chooses
    assert ask_of(planned({"prompt": "a", "bot_task": "image", "size": "auto"}, "ar", task="chat")).task == "ratio"


def test_thoughts_of_a_picture_without_the_picture() -> None:
    found = planned({"prompt": "a cat"}, "ar", ("text",))
    assert (found.stages, ask_of(found).chooses_size) == (("ar",), True)


def test_pictures_come_before_the_text_of_their_turn() -> None:
    media = {key: MultimodalPayload.of(image=np.zeros((4, 6 + n, 3), np.uint8)) for n, key in enumerate("xyz")}
    content = [{"type": "text", "text": "one "}, {"type": "image", "media": "y"}, {"type": "text", "text": "two"}]
    request = OmniRequest(
        id="r", task="chat", messages=[
            {"role": "user", "content": [{"type": "image", "media": "x"}]},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": content},
        ],
        params={"images": [{"media": "z"}]},
    )  # fmt: skip
    found = plan(request, media, config("ar_dit"))
    ask = ask_of(found)
    assert ask.turns == (
        Turn("user", (Part(picture=1),)),
        Turn("assistant", (Part("ok"),)),
        Turn("user", (Part(picture=0), Part(picture=2), Part("one two"))),
    )
    assert ask.pictures == ((4, 8), (4, 6), (4, 7))
    assert found.inputs[0].payload["0"].shape == (4, 8, 3)


def test_sampling_is_the_checkpoints_unless_the_deployment_or_the_request_says_otherwise() -> None:
    assert planned({"prompt": "a"}).params["ar"]["sampling"] == {"temperature": 0.0, "ignore_eos": True}
    assert planned({"prompt": "a"}, "ar", task="chat").params["ar"]["sampling"] == {"temperature": 0.0}
    settled = planned({"prompt": "a"}, "ar", task="chat", overrides={"sampling.ar.temperature": 0.3})
    assert settled.params["ar"]["sampling"] == {}


def test_handover_can_be_switched_off() -> None:
    assert not ask_of(planned({"prompt": "a"}, overrides={"stages.dit.kv_handover": False})).handover


REFUSED: list[tuple[dict[str, Any], str, str, tuple[str, ...] | None, str]] = [
    ({}, "ar_dit", "image", None, "prompt"),
    ({"prompt": ""}, "ar_dit", "image", None, "prompt"),
    ({"prompt": "a", "messages": []}, "ar_dit", "image", None, "prompt"),
    ({"messages": []}, "ar_dit", "chat", None, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "ar_dit", "chat", None, "messages[0]"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "ar_dit", "chat", None, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "ar_dit", "chat", None, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "ar_dit", "chat", None, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "ar_dit", "chat", None, "messages[0]"),
    ({"prompt": "a", "size": "12"}, "ar_dit", "image", None, "size"),
    ({"prompt": "a", "size": "64x64", "height": 64, "width": 64}, "ar_dit", "image", None, "size"),
    ({"prompt": "a", "height": 64}, "ar_dit", "image", None, "width"),
    ({"prompt": "a", "height": 8, "width": 64}, "ar_dit", "image", None, "height"),
    ({"prompt": "a", "bot_task": "draw"}, "ar_dit", "image", None, "bot_task"),
    ({"prompt": "a", "bot_task": "auto"}, "ar_dit", "image", None, "bot_task"),
    ({"prompt": "a", "bot_task": "image"}, "ar_dit", "chat", ("text",), "bot_task"),
    ({"prompt": "a", "bot_task": "think"}, "dit", "image", None, "bot_task"),
    ({"prompt": "a", "size": "auto"}, "dit", "image", None, "size"),
    ({"prompt": "a"}, "dit", "chat", ("text",), "modalities"),
    ({"prompt": "a"}, "ar", "image", ("image",), "modalities"),
    ({"prompt": "a"}, "ar_dit", "image", ("audio",), "modalities"),
    ({"prompt": "a", "bot_task": "image", "size": "64x64"}, "ar_dit", "image", ("text",), "modalities"),
    ({"prompt": "a", "num_inference_steps": 0}, "ar_dit", "image", None, "num_inference_steps"),
    ({"prompt": "a", "flow_shift": 0}, "ar_dit", "image", None, "flow_shift"),
    ({"prompt": "a", "negative_prompt": "b"}, "ar_dit", "image", None, "negative_prompt"),
    ({"prompt": "a", "use_system_prompt": "en"}, "ar_dit", "image", None, "use_system_prompt"),
    ({"prompt": "a", "use_system_prompt": "en_unified"}, "ar_dit", "image", None, "use_system_prompt"),
    ({"prompt": "a", "use_system_prompt": "custom"}, "ar_dit", "image", None, "system_prompt"),
    ({"prompt": "a", "use_system_prompt": "None", "system_prompt": "x"}, "ar_dit", "image", None, "system_prompt"),
    (
        {"prompt": "a", "images": ["a", "b", "c"], "sequence_template": "x"},
        "ar_dit",
        "image",
        None,
        "sequence_template",
    ),
]


@pytest.mark.parametrize(("ask", "variant", "task", "modalities", "param"), REFUSED)
def test_refused_by_name(
    ask: dict[str, Any], variant: str, task: str, modalities: tuple[str, ...] | None, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        planned(ask, variant, modalities, task)
    assert caught.value.info.param == param


@pytest.mark.parametrize(
    ("array", "images"),
    [
        (np.zeros((4, 4), np.uint8), [{"media": "m"}]),
        (np.zeros((4, 4, 4), np.uint8), [{"media": "m"}]),
        (np.zeros((4, 4, 3), np.float32), [{"media": "m"}]),
        (np.zeros((0, 4, 3), np.uint8), [{"media": "m"}]),
        (np.zeros((4, 4, 3), np.uint8), [{"media": "other"}]),
        (np.zeros((4, 4, 3), np.uint8), []),
        (np.zeros((4, 4, 3), np.uint8), [{"media": "m"}] * 4),
    ],
)
def test_media_that_are_no_pictures_or_too_many_are_refused(array: Any, images: Any) -> None:
    request = OmniRequest(id="r", task="image", prompt="a", params={"images": images})
    with pytest.raises(RequestError):
        plan(request, {"m": MultimodalPayload.of(image=array)}, config("ar_dit"))


@pytest.mark.parametrize("fields", [{"raw_prompt": "a"}, {"prompt": "a", "voice": "v"}])
def test_fields_without_a_meaning_here_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        plan(OmniRequest(id="r", task="image", **fields), {}, config("ar_dit"))


@pytest.fixture
def prompted(tmp_path: Path) -> Path:
    """The checkpoint's JSON files with system prompts beside them."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors", "reference.*", "distil_overlay"))
    (folder / "system_prompt.py").write_text(PROMPTS)
    return folder


def test_system_prompts_are_read_from_the_folder_without_running_it(prompted: Path) -> None:
    for kind, task, text in (
        ("en_vanilla", "image", "\nDraw plainly.\n"),
        ("en_unified", "image", " Do it all. "),
        ("dynamic", "image", "Draw plainly."),
        ("dynamic", "think", "Think, then describe."),
        ("dynamic", "recaption", "Describe."),
        ("dynamic", "auto", None),
        ("None", "image", None),
    ):
        assert system_prompt_of(prompted, kind, task, None) == text


def test_system_prompt_by_type_or_text(prompted: Path) -> None:
    for given, text in (
        ({"system_prompt": "en_unified"}, "Do it all."),
        ({"use_system_prompt": "en_unified"}, "Do it all."),
        ({"system_prompt": "en unified"}, "en unified"),
        ({"system_prompt": "x", "use_system_prompt": "custom"}, "x"),
        ({}, None),
    ):
        assert ask_of(planned({"prompt": "a"} | given, folder=prompted)).system == text


def test_dropped_thinking_draws_under_the_caption_prompt(prompted: Path) -> None:
    ask = ask_of(planned({"prompt": "a", "system_prompt": "S", "drop_think": True}, folder=prompted))
    assert (ask.system, ask.drawing_system) == ("S", "Describe.")
    ask = ask_of(planned({"prompt": "a", "drop_think": True}, folder=prompted))
    assert (ask.system, ask.drawing_system) == (None, None)


def test_base_checkpoints_draw_at_once_and_edit_nothing(prompted: Path) -> None:
    file = prompted / "generation_config.json"
    values = json.loads(file.read_text()) | {"sequence_template": "pretrain", "bot_task": "image", "do_sample": True}
    file.write_text(json.dumps(values))
    checkpoint = read_checkpoint(prompted)
    assert checkpoint.defaults.sampling == {"temperature": 0.6, "top_k": 1024, "top_p": 0.95}
    assert ask_of(planned({"prompt": "a", "system_prompt": " S "}, folder=prompted)).system == " S "
    with pytest.raises(RequestError, match="Instruct"):
        planned({"prompt": "a", "images": ["a"]}, folder=prompted)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_type", "layer"),
        ("use_mla", True),
        ("num_shared_expert", 2),
        ("moe_topk", [2]),
        ("vae", 3),
        ("vocab_size", None),
    ],
)
def test_other_networks_are_refused_by_key(prompted: Path, key: str, value: Any) -> None:
    file = prompted / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=key):
        read_checkpoint(prompted)


@pytest.mark.parametrize(("file", "stages"), [("ar", ["ar"]), ("dit", ["dit"]), ("two_processes", ["ar", "dit"])])
def test_deploy_files_of_the_family(file: str, stages: list[str]) -> None:
    deploy = Path(str(pipeline.__file__)).parent / f"{file}.yaml"
    resolved = resolve_config(str(FOLDER), deploy)
    assert list(resolved.stages) == stages
    assert all(stage.placement == "process" for stage in resolved.stages.values())
