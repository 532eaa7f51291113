"""The plan counts the weights that each stage loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnistage.config.registry import load_pipeline
from omnistage.config.resolve import resolve_config
from omnistage.runtime.memory_plan import memory_plan
from tests.models.held import declared_and_held

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("variant", "stage", "dtype"),
    [
        ("default", "diffusion", "bfloat16"),
        ("split", "encoder", "float32"),
        ("split", "diffusion", "float32"),
        ("split", "decoder", "float32"),
    ],
)
def test_weights_are_counted(checkpoint: Path, variant: str, stage: str, dtype: str) -> None:
    declared, held = declared_and_held(
        checkpoint, stage, variant=variant, dtype=dtype, **{"stages.diffusion.partition": "both"}
    )
    # Buffers that a file holds, a norm that a stage drops: no more.
    assert held > 10_000
    assert declared == pytest.approx(held, rel=0.005)


def test_codecs_are_counted_on_a_clip_of_the_default_size(checkpoint: Path) -> None:
    """A canvas of 2048 pixels; decoded pieces of 28 frames of which 17 are used, then the whole clip."""
    config = resolve_config(str(checkpoint), None, {"variant": "split", "dtype": "float32", "device": "cpu"})
    plan = memory_plan(config, load_pipeline(config.pipeline), {"cpu": 4 << 30})
    encoder, _, decoder = (stage.working for stage in plan.stages)
    assert (plan.lacks, encoder.of, decoder.of) == ([], "encoding a video", "decoding 124 frames")
    clip = 124 * 2048 * 3 * 4
    assert decoder.nbytes == clip * 28 // 17 + clip
    assert encoder.nbytes == 2 * 136 * 2048 * 3 * 4 + 6 * 8 * 17 * 2048 * 4
