"""The plan counts the weights that the painters load."""

from __future__ import annotations

import pytest

from tests.models.held import declared_and_held


@pytest.mark.slow
def test_weights_are_counted_exactly() -> None:
    declared, held = declared_and_held("tiny-shapes", "painter")
    assert declared == held > 1_000_000
