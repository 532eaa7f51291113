"""The plan counts the weights that each stage loads."""

from __future__ import annotations

from pathlib import Path

import pytest

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
