"""The judge on pictures whose attributes are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omnistage.models.tiny_shapes.drawing import Attributes, random_attributes, render
from omnistage.models.tiny_shapes.judge import Judge, frechet_distance, load_judge, pictures_of, verdicts


@pytest.fixture(scope="module")
def judge() -> Judge:
    torch.set_num_threads(1)
    return load_judge()


def drawn(seed: int, count: int = 200) -> tuple[list[Attributes], torch.Tensor]:
    draw = np.random.default_rng(seed)
    asked = random_attributes(count, draw)
    return asked, torch.from_numpy(render(asked, draw)).permute(0, 3, 1, 2)


def test_judge_names_what_was_drawn(judge: Judge) -> None:
    asked, pictures = drawn(1)
    assert verdicts(judge, pictures, asked).all(1).mean() >= 0.99


def test_judge_says_no_to_another_picture(judge: Judge) -> None:
    asked, pictures = drawn(2)
    assert verdicts(judge, pictures, asked[1:] + asked[:1]).all(1).mean() < 0.02


def test_frechet_distance_tells_real_pictures_from_noise(judge: Judge) -> None:
    asked, pictures = drawn(3)
    again = torch.from_numpy(render(asked, np.random.default_rng(9))).permute(0, 3, 1, 2)
    near = frechet_distance(judge, again, pictures)
    far = frechet_distance(judge, torch.randn_like(pictures), pictures)
    assert near < 100 < far / 10


def test_answer_pictures_become_judge_pictures() -> None:
    made = pictures_of(np.array([[[[0, 127, 255]]]], np.uint8))
    assert made.shape == (1, 3, 1, 1)
    assert made.flatten().tolist() == pytest.approx([-1.0, -0.004, 1.0], abs=1e-3)
