"""Fixtures of the whole suite: the folders of the embedded weights, fetched into the default cache by the first run."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnistage.models.smollm2 import SMOLLM2
from omnistage.weights import default_cache_dir
from tests import fuzzing

fuzzing.register()


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, float32."""
    return SMOLLM2.ensure(default_cache_dir())
