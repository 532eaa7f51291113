"""The servers that official clients talk to: the embedded weights, and a tiny random model of pictures and videos."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.cosmos3.tiny import make
from tests.servers import Server, serving


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """smol-speech: chat, tools, shapes, speech, transcription."""
    with serving(tmp_path_factory.mktemp("chat"), "smol-speech") as server:
        yield server


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`tiny`: pictures and videos of 48x32."""
    folder: Path = make("base", tmp_path_factory.mktemp("tiny") / "base").folder
    arguments = ("--set", "placement=inline", "--set", "served_name=tiny")
    with serving(tmp_path_factory.mktemp("media"), str(folder), *arguments) as server:
        yield server


@pytest.fixture(scope="session")
def addresses(chat: Server, media: Server) -> dict[str, str]:
    """As the scripts read them from their environment."""
    return {"CHAT": chat.address, "MEDIA": media.address, "NO_PROXY": "*", "no_proxy": "*"}
