"""The tiny checkpoint, its parts and what the official implementation computed on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.config.model import StageConfig
from omnistage.models.hunyuan_image3.checkpoint import Checkpoint, read_checkpoint
from omnistage.models.hunyuan_image3.components import Components
from omnistage.models.hunyuan_image3.drawing_stage import Drawer
from omnistage.models.hunyuan_image3.text_stage import Talk, Writer
from omnistage.models.hunyuan_image3.vocabulary import Vocabulary
from omnistage.shared import SharedObjects
from omnistage.stages.ar.engine import AREngine
from omnistage.stages.ar.torch_backend import TorchBackend
from tests.models.hunyuan_image3.harness import FOLDER, small_checkpoint

Near = Callable[[str, Any], None]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def arrays() -> dict[str, Any]:
    with np.load(FOLDER / "reference.npz") as content:
        return dict(content)


@pytest.fixture(scope="session")
def near(arrays: dict[str, Any]) -> Near:
    def check(name: str, got: Any) -> None:
        """Shape equal and every number within 1e-4 (float16 dumps: 2e-3)."""
        right, found = arrays[name], np.asarray(got)
        assert found.shape == right.shape, name
        tolerance = 2e-3 if right.dtype == np.float16 else 1e-4
        assert np.abs(found.astype(np.float64) - right).max() <= tolerance, name

    return check


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    return read_checkpoint(FOLDER)


@pytest.fixture(scope="session")
def vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    return Vocabulary.load(checkpoint)


@pytest.fixture(scope="session")
def components(checkpoint: Checkpoint) -> Components:
    return Components(checkpoint, torch.device("cpu"), torch.float32, SharedObjects())


@pytest.fixture(scope="session")
def drawer(components: Components, vocabulary: Vocabulary) -> Drawer:
    return Drawer(components, vocabulary)


@pytest.fixture(scope="session")
def distilled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with the overlay of its distilled twin."""
    folder = tmp_path_factory.mktemp("hunyuan") / "distilled"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("reference.*", "distil_overlay"))
    shutil.copytree(FOLDER / "distil_overlay", folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("hunyuan") / "small")


def _drawer(folder: Path) -> Drawer:
    checkpoint = read_checkpoint(folder)
    components = Components(checkpoint, torch.device("cpu"), torch.float32, SharedObjects())
    return Drawer(components, Vocabulary.load(checkpoint))


@pytest.fixture(scope="session")
def small_drawer(small_folder: Path) -> Drawer:
    return _drawer(small_folder)


@pytest.fixture(scope="session")
def distilled_drawer(distilled_folder: Path) -> Drawer:
    return _drawer(distilled_folder)


@pytest.fixture
def text_engine(components: Components, vocabulary: Vocabulary) -> Iterator[AREngine[Talk]]:
    yield from _text_engine(components, vocabulary)


@pytest.fixture
def small_text_engine(small_folder: Path) -> Iterator[AREngine[Talk]]:
    checkpoint = read_checkpoint(small_folder)
    components = Components(checkpoint, torch.device("cpu"), torch.float32, SharedObjects())
    yield from _text_engine(components, Vocabulary.load(checkpoint))


def _text_engine(components: Components, vocabulary: Vocabulary) -> Iterator[AREngine[Talk]]:
    """The text stage with room for 4096 tokens, of which a step computes at most 100."""
    settings = StageConfig(name="ar", kind="ar", token_budget=100)
    engine = AREngine(TorchBackend(Writer(components, vocabulary), settings, blocks=256), settings)
    yield engine
    assert engine.request_ids() == frozenset()
    engine.check_integrity()
    engine.close()
