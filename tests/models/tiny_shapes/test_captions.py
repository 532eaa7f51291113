"""Free prompts become the one sentence that the model knows, or are refused word by word."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from omnistage.errors import RequestError
from omnistage.models.tiny_shapes.captions import LENGTH, WORDS, caption, read_prompt, tokens
from omnistage.models.tiny_shapes.drawing import VALUES, Attributes, random_attributes


@pytest.mark.parametrize(
    ("prompt", "right"),
    [
        ("a small red star at the top of a navy background", "a small red star at the top of a navy background"),
        ("Tiny crimson star, top, midnight background!", "a small red star at the top of a navy background"),
        ("draw a big golden doughnut", "a large yellow ring in the center of a white background"),
        ("circle", "a large red circle in the center of a white background"),
        ("a violet box on the left, grey backdrop", "a large purple square on the left of a gray background"),
        ("show me one cyan cross on a black background", "a large cyan cross in the center of a black background"),
    ],
)  # fmt: skip
def test_prompt_is_read_for_its_attributes(prompt: str, right: str) -> None:
    assert caption(read_prompt(prompt)) == right


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ("a red elephant", "elephant"),
        ("a red star and a circle", "circle"),
        ("a red and blue star", "blue"),
        ("a star on a blue background", "blue"),
        ("something red", "something"),
        ("red", "shape"),
        ("", "shape"),
    ],
)
def test_what_cannot_be_drawn_is_named(prompt: str, word: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        read_prompt(prompt)
    assert caught.value.info.param == "prompt"


def test_every_caption_is_read_back_as_what_it_says_and_fits_the_table() -> None:
    for values in itertools.product(*VALUES):
        one = Attributes(*values)
        assert read_prompt(caption(one)) == one
        assert len(tokens(one)) == LENGTH
        assert [WORDS[number] for number in tokens(one) if number] == caption(one).split()


def test_random_attributes_reach_every_value() -> None:
    drawn = random_attributes(500, np.random.default_rng(0))
    for values, seen in zip(VALUES, zip(*drawn, strict=True), strict=True):
        assert set(seen) == set(values)
