"""Fixtures of the whole suite: the embedded weights, fetched into the default cache by the first run, and a server of
them that several modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from omnistage.models.smollm2 import SMOLLM2
from omnistage.weights import default_cache_dir
from tests import fuzzing
from tests.servers import Server, serving

fuzzing.register()

# What uses session fixtures that are servers: one worker runs them all, so that each server is started once.
SHARING = (
    "tests/clients/",
    "tests/models/smol_speech/test_hostile.py",
    "tests/models/smol_speech/test_page.py",
    "tests/models/smol_speech/test_server.py",
)


class SharedServers(LoadScopeScheduling):  # type: ignore[misc]
    """`--dist loadscope` where the modules that share servers are one scope."""

    def _split_scope(self, nodeid: str) -> str:
        return "sharing" if nodeid.startswith(SHARING) else str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedServers | None:
    return SharedServers(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, float32."""
    return SMOLLM2.ensure(default_cache_dir())


@pytest.fixture(scope="session")
def smol_speech(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of smol-speech; greedy where a request says nothing, since a sampled answer may be wrong."""
    settings = ("--set", "limits.max_audio_s=20", "--set", "sampling.thinker.temperature=0")
    with serving(tmp_path_factory.mktemp("smol_speech"), "smol-speech", *settings) as server:
        yield server
