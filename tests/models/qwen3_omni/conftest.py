"""The tiny checkpoint, its models and its reference answers, made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.qwen3_omni.reference import Reference
from tests.models.qwen3_omni.stages import Models
from tests.models.qwen3_omni.tiny import write_checkpoint

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_omni")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def models(checkpoint: Path) -> Models:
    return Models(checkpoint)


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)
