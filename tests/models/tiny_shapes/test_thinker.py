"""The variant in which SmolLM2 reads the caption: hidden states go from an AR stage to the painter, real weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from omnistage.models.tiny_shapes.captions import caption
from omnistage.models.tiny_shapes.drawing import Attributes
from omnistage.models.tiny_shapes.judge import load_judge, pictures_of, verdicts
from omnistage.models.tiny_shapes.network import HiddenPainter, load_weights
from omnistage.models.tiny_shapes.quality import asked_attributes, draw_pictures
from omnistage.models.tiny_shapes.stage import HIDDEN_WEIGHTS, drawn
from tests.engines import answer, running

pytestmark = pytest.mark.slow

THINKER = {"variant": "thinker", "stages.thinker.dtype": "float32"}


class Hidden:
    """The library's own hidden states of captions."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._decoder: Any = model.get_decoder().eval()

    @torch.inference_mode()
    def __call__(self, asked: list[Attributes]) -> torch.Tensor:
        ids = [self._tokenizer.encode(caption(one)).ids for one in asked]
        states: torch.Tensor = self._decoder(input_ids=torch.tensor(ids)).last_hidden_state
        return states


async def test_pictures_are_those_of_the_library_states_and_of_the_prompt(smollm2_folder: Path) -> None:
    torch.set_num_threads(1)
    count = 48
    asked = asked_attributes(count)
    async with running("tiny-shapes", THINKER | {"placement": "inline"}) as engine:
        results = await asyncio.gather(
            *(answer(engine, id=f"r{at}", prompt=caption(one), seed=at) for at, one in enumerate(asked))
        )
    served = np.concatenate([result.tensors["image"] for result in results])
    painter = HiddenPainter()
    load_weights(painter, HIDDEN_WEIGHTS)
    right, _, _ = draw_pictures(painter, asked[:8], Hidden(smollm2_folder))
    for at in range(8):
        assert np.abs(served[at].astype(int) - drawn(right[at : at + 1], (32, 32))[0]).max() <= 1
    assert verdicts(load_judge(), pictures_of(served), asked).all(1).mean() >= 0.8
    assert results[0].metrics is not None
    assert set(results[0].metrics.stages) == {"thinker", "painter"}


async def test_hand_over_between_processes_gives_the_same_picture(smollm2_folder: Path) -> None:
    pictures = []
    for placement in ("inline", "process"):
        async with running("tiny-shapes", THINKER | {"placement": placement}) as engine:
            result = await answer(engine, id="a", prompt="a tiny blue ring", seed=3, params={"num_inference_steps": 4})
            pictures.append(result.tensors["image"].astype(int))
    assert np.abs(pictures[0] - pictures[1]).max() <= 1
