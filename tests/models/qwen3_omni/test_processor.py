from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from omnistage.models.qwen3_omni.media import MediaItem, MediaSet
from omnistage.models.qwen3_omni.processor import MediaProcessor, NumpyVideoProcessor, sampled_frames
from omnistage.stages.ar.chat_template import ChatTemplate
from tests.models.qwen3_omni.reference import HELLO
from tests.models.qwen3_omni.tiny import PICTURES

LIMITS = {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 32 * 32}


@pytest.mark.parametrize("size", [(64, 96), (90, 75), (20, 30), (400, 300)], ids=str)
def test_a_still_video_becomes_the_patches_of_its_picture(size: tuple[int, int]) -> None:
    picture = np.random.default_rng(1).integers(0, 255, (*size, 3)).astype(np.uint8)
    expected = Qwen2VLImageProcessorPil(**PICTURES)(picture, return_tensors="pt")
    made = NumpyVideoProcessor(size=LIMITS)([np.stack([picture, picture])])
    assert made["video_grid_thw"].tolist() == expected["image_grid_thw"].tolist()
    np.testing.assert_allclose(made["pixel_values_videos"], expected["pixel_values"], rtol=0, atol=1e-5)


def test_an_odd_number_of_frames_repeats_the_last() -> None:
    frames = np.random.default_rng(1).integers(0, 255, (3, 64, 64, 3)).astype(np.uint8)
    odd = NumpyVideoProcessor(size=LIMITS)([frames])
    even = NumpyVideoProcessor(size=LIMITS)([np.concatenate([frames, frames[-1:]])])
    assert odd["video_grid_thw"].tolist() == [[2, 4, 4]]
    np.testing.assert_array_equal(odd["pixel_values_videos"], even["pixel_values_videos"])


def test_the_limits_of_a_call_apply_when_the_checkpoint_has_none() -> None:
    frames = np.zeros((2, 64, 64, 3), np.uint8)
    assert NumpyVideoProcessor()([frames], size={**LIMITS, "shortest_edge": 128 * 128})["video_grid_thw"].tolist() == [
        [1, 8, 8]
    ]
    assert NumpyVideoProcessor(size=LIMITS)([frames], size={"shortest_edge": 1, "longest_edge": 2})[
        "video_grid_thw"
    ].tolist() == [[1, 4, 4]]


@pytest.mark.parametrize(
    ("count", "rate", "fps", "expected"),
    [
        (6, 0.0, 2.0, [0, 1, 2, 3, 4, 5]),
        (10, 5.0, 1.0, [0, 5]),
        (48, 24.0, 2.0, [0, 12, 24, 36]),
        (2, 1.0, 2.0, [0, 0, 1, 1]),
        (1, 30.0, 2.0, [0]),
    ],
)
def test_frames_are_those_on_show_at_regular_times(count: int, rate: float, fps: float, expected: list[int]) -> None:
    frames = np.arange(count, dtype=np.uint8).reshape(count, 1, 1, 1)
    assert sampled_frames(frames, rate, fps).ravel().tolist() == expected


@pytest.mark.slow
def test_a_checkpoint_in_the_older_layout_is_read(checkpoint: Path, tmp_path: Path) -> None:
    """Without tokenizer.json, processor_config.json and chat_template.jinja, as the first releases have it."""
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    template = (checkpoint / "chat_template.jinja").read_text()
    for name in ("preprocessor_config.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text((checkpoint / name).read_text())
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    config = Qwen3OmniMoeConfig.from_pretrained(tmp_path).thinker_config
    old, new = MediaProcessor(str(tmp_path), config), MediaProcessor(str(checkpoint), config)
    text = "<|im_start|>user\nHello <|vision_start|><|video_pad|><|vision_end|>"
    media, frames = MediaSet([MediaItem("video")], 1.0), np.zeros((4, 64, 96, 3), np.uint8)
    # Without limits of its own the released model's apply: at least 128 merge units per frame.
    assert len(old.prepare(text, media, [frames]).ids) > len(new.prepare(text, media, [frames]).ids)
    assert old.tokenizer.encode(HELLO).ids == new.tokenizer.encode(HELLO).ids
    assert ChatTemplate.load(tmp_path) is not None
