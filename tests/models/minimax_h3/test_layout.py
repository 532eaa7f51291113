"""Rows, tags and positions are those of the reference, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from omnistage.models.minimax_h3.layout import LatentSize, rows_of
from omnistage.models.minimax_h3.state import patchify, unpatchify
from tests.models.minimax_h3.harness import ASKS, OneStage
from tests.models.minimax_h3.reference import Reference


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ASKS))
def test_packed_sequence_equals_the_reference(reference: Reference, checkpoint: Path, name: str) -> None:
    call = reference.run(0, **ASKS[name]).calls[0]
    stage = OneStage(checkpoint)
    stage.add(name, 0, ASKS[name])
    stage.step()
    (entry,) = stage.engine._entries.values()
    assert entry.state.prepared is not None
    layout = entry.state.prepared.layout
    assert torch.equal(layout.positions, call["position_ids"])
    assert torch.equal(layout.tags, call["token_tags"])
    assert torch.equal(layout.video, call["video_indices"])
    assert torch.equal(layout.audio, call["audio_indices"])
    assert layout.text_rows == len(call["text_indices"])
    conditioned = bool(ASKS[name].get("references"))
    estimate = rows_of(entry.state.ask, (1, 2, 2), layout.text_rows)
    assert estimate < layout.rows if conditioned else estimate == layout.rows
    stage.engine.abort(name)


def test_patches_come_back_as_the_latents_they_were() -> None:
    latents = torch.arange(2 * 3 * 4 * 6.0).reshape(1, 2, 3, 4, 6)
    rows = patchify(latents, (1, 2, 2))
    assert rows.shape == (3 * 2 * 3, 8)
    # second row: first frame, first row of patches, second patch; channels before the places in the patch
    assert rows[1].tolist() == [
        *latents[0, 0, 0, :2, 2:4].flatten().tolist(),
        *latents[0, 1, 0, :2, 2:4].flatten().tolist(),
    ]
    assert np.array_equal(unpatchify(rows, LatentSize(3, 4, 6), (1, 2, 2)).numpy(), latents.numpy())
