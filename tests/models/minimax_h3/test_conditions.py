"""Conditions on their way between stages, and text encoding in a batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from omnistage.models.minimax_h3.conditions import Conditions, read_conditions
from tests.models.minimax_h3.harness import ASKS, OneStage
from tests.models.minimax_h3.reference import Reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_payload_brings_conditions_back_bit_for_bit(dtype: torch.dtype) -> None:
    made = Conditions(
        torch.randn(5, 8).to(dtype),
        np.array([1, 0, 0, 1, 1], np.int8),
        [torch.randn(1, 2, 1, 4, 4)],
        [torch.randn(6, 3)],
    )
    back = read_conditions(made.payload())
    assert back.text.dtype == dtype
    assert torch.equal(back.text, made.text)
    assert np.array_equal(back.tags, made.tags)
    assert torch.equal(back.visual[0], made.visual[0])
    assert torch.equal(back.sound[0], made.sound[0])


@pytest.mark.slow
def test_texts_of_a_batch_equal_the_reference(reference: Reference, checkpoint: Path) -> None:
    stage = OneStage(checkpoint)
    for seed, (name, ask) in enumerate(ASKS.items()):
        stage.add(name, seed, ask)
    states = [entry.state for entry in stage.engine._entries.values()]
    stage.model.encode(states)
    for seed, (state, ask) in enumerate(zip(states, ASKS.values(), strict=True)):
        right = reference.run(seed, **ask).prompt_embeds
        assert state.conditions is not None
        assert state.conditions.text.shape == right.shape
        assert np.abs(state.conditions.text.numpy() - right).max() <= 5e-5
        stage.engine.abort(list(ASKS)[seed])
