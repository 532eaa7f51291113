"""One tiny checkpoint for all tests of the family, and the reference on the same modules."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models.minimax_h3 import tiny
from tests.models.minimax_h3.reference import Reference


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("minimax_h3") / "tiny-h3"


@pytest.fixture(scope="session")
def reference(checkpoint_folder: Path) -> Iterator[Reference]:
    """Also builds the checkpoint."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # weight_norm of the audio autoencoder is deprecated in torch
        modules = tiny.build(checkpoint_folder)
    yield Reference(str(checkpoint_folder), modules)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(reference: Reference, checkpoint_folder: Path) -> Path:
    return checkpoint_folder
