"""The servers that official clients talk to: the embedded weights, and tiny random models of pictures and videos."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.cosmos3.tiny import make
from tests.models.hunyuan_image3.harness import small_checkpoint
from tests.servers import Server, serving


@pytest.fixture(scope="session")
def chat(smol_speech: Server) -> Server:
    """smol-speech: chat, tools, shapes, speech, transcription."""
    return smol_speech


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`tiny`: pictures and videos of 48x32."""
    folder: Path = make("base", tmp_path_factory.mktemp("tiny") / "base").folder
    arguments = ("--set", "placement=inline", "--set", "served_name=tiny")
    with serving(tmp_path_factory.mktemp("media"), str(folder), *arguments) as server:
        yield server


@pytest.fixture(scope="session")
def edit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`editor`: draws and edits pictures of about 64x64."""
    folder = small_checkpoint(tmp_path_factory.mktemp("editor") / "small")
    settings = {"placement": "inline", "served_name": "editor", "dtype": "float32", "stages.ar.kv_memory_mb": 8}
    arguments = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with serving(tmp_path_factory.mktemp("edit"), str(folder), *arguments) as server:
        yield server


@pytest.fixture(scope="session")
def addresses(chat: Server, media: Server, edit: Server) -> dict[str, str]:
    """As the scripts read them from their environment."""
    return {"CHAT": chat.address, "MEDIA": media.address, "EDIT": edit.address, "NO_PROXY": "*", "no_proxy": "*"}
