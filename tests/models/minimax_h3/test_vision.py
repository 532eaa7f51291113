"""Clips for the text encoder, without torchvision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from omnistage.errors import ConfigError
from omnistage.models.minimax_h3.vision import VisionProcessor
from tests.models.minimax_h3 import tiny


@pytest.fixture
def processor(tmp_path: Path) -> VisionProcessor:
    tiny._write_processor(tmp_path)
    return VisionProcessor(tmp_path)


def test_clip_of_one_picture_twice_has_the_patches_of_the_picture(processor: VisionProcessor) -> None:
    """The picture processor is the library's: it repeats a picture to fill a temporal patch."""
    picture = tiny.picture(1, 64, 96)
    still = processor.pictures([picture])
    moving = processor.clip(np.stack([picture, picture]))
    assert moving.grids == still.grids == [(1, 4, 6)]
    assert torch.allclose(moving.values, still.values, atol=1e-6)


def test_odd_clip_repeats_its_last_frame(processor: VisionProcessor) -> None:
    clip = tiny.clip(2, 3)
    whole = processor.clip(np.concatenate([clip, clip[-1:]]))
    odd = processor.clip(clip)
    assert odd.grids == whole.grids == [(2, 2, 4)]
    assert torch.equal(odd.values, whole.values)


@pytest.mark.parametrize(
    ("height", "width", "grid"), [(30, 70, (2, 2, 4)), (20, 80, (2, 2, 8)), (2048, 4096, (1, 128, 256))]
)
def test_clip_goes_to_the_nearest_multiple_of_a_merge_block(
    processor: VisionProcessor, height: int, width: int, grid: tuple[int, int, int]
) -> None:
    frames = 2 * grid[0]
    made = processor.clip(np.full((frames, height, width, 3), 128, np.uint8))
    assert made.grids == [grid]
    assert made.values.shape == (grid[0] * grid[1] * grid[2], 3 * 2 * 16 * 16)
    assert float((made.values - (128 / 255 - 0.5) / 0.5).abs().max()) < 1e-6


def test_missing_processor_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        VisionProcessor(tmp_path)
