"""The plan counts the weights that each stage loads: of the transformer one tower or both."""

from __future__ import annotations

import pytest

from tests.models.cosmos3.conftest import Make
from tests.models.held import declared_and_held

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("variant", "stage", "dtype"),
    [("default", "diffusion", "bfloat16"), ("split", "reasoner", "float32"), ("split", "generator", "float32")],
)
def test_weights_are_counted(tiny: Make, variant: str, stage: str, dtype: str) -> None:
    declared, held = declared_and_held(tiny("base").folder, stage, variant=variant, dtype=dtype)
    # Buffers that a file holds, a norm that a stage drops: no more.
    assert held > 10_000
    assert declared == pytest.approx(held, rel=0.002)
