"""The plan counts the weights that each stage loads, in the form in which it holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.held import declared_and_held

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("stage", "dtype"), [("thinker", "float32"), ("talker", "bfloat16"), ("code2wav", "float32")])
def test_plain_weights_are_counted_exactly(checkpoint: Path, stage: str, dtype: str) -> None:
    declared, held = declared_and_held(
        checkpoint, stage, dtype=dtype, weight_layout="auto" if dtype != "float32" else "plain"
    )
    assert declared == held > 100_000


@pytest.mark.parametrize(
    ("stage", "layout"), [("thinker", "both"), ("talker", "blocked"), ("code2wav", "both"), ("code2wav", "blocked")]
)
def test_weights_in_blocks_are_counted_exactly(checkpoint: Path, stage: str, layout: str) -> None:
    declared, held = declared_and_held(checkpoint, stage, **{f"stages.{stage}.weight_layout": layout})
    assert declared == held > 100_000


def test_packed_weights_are_counted_exactly(checkpoint: Path) -> None:
    declared, held = declared_and_held(checkpoint, "thinker", **{"stages.thinker.quantization": "int4"})
    assert declared == held > 100_000
