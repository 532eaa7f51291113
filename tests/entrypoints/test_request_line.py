"""Request lines: known fields, model parameters, media from files and data URLs."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omnistage.config.model import LimitsConfig
from omnistage.entrypoints.request_line import Line, parse_line
from omnistage.errors import RequestError
from omnistage.media.audio_encode import encode_audio

LIMITS = LimitsConfig()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tone = np.sin(np.arange(800, dtype=np.float32) / 9)[None]
    (tmp_path / "a.wav").write_bytes(encode_audio("wav", tone, 16000))
    Image.fromarray(np.full((4, 6, 3), 200, np.uint8)).save(tmp_path / "p.png")
    np.save(tmp_path / "frames.npy", np.zeros((2, 4, 4, 3), np.uint8))
    return tmp_path


def line(folder: Path, **fields: Any) -> Line:
    return parse_line({"id": "x", **fields}, LIMITS, folder)


def test_unknown_fields_are_model_parameters(folder: Path) -> None:
    parsed = line(folder, prompt="p", num_inference_steps=4, size="64x64", sampling={"ar": {"top_k": 1}}, seed=3)
    assert parsed.request.params == {"num_inference_steps": 4, "size": "64x64"}
    assert (parsed.request.seed, parsed.request.sampling) == (3, {"ar": {"top_k": 1}})


def test_message_parts_become_media(folder: Path) -> None:
    data = base64.b64encode((folder / "a.wav").read_bytes()).decode()
    content = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "p.png"}},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
    ]
    parsed = line(folder, messages=[{"role": "user", "content": content}])
    assert parsed.request.messages is not None
    parts = parsed.request.messages[0]["content"]
    assert [part["type"] for part in parts] == ["text", "image", "audio", "audio"]
    assert parsed.media[parts[1]["media"]]["image"].shape == (4, 6, 3)
    for part in parts[2:]:
        assert parsed.media[part["media"]]["audio"].shape == (1, 800)
        assert parsed.media[part["media"]].meta["sample_rate"] == 16000


def test_references_and_keyframes_become_media(folder: Path) -> None:
    references = [{"image": "p.png"}, {"video": "frames.npy", "fps": 12, "audio": "a.wav"}]
    parsed = line(folder, prompt="p", references=references, image="p.png")
    first, second = parsed.request.params["references"]
    assert parsed.media[first["image"]["media"]]["image"].shape == (4, 6, 3)
    assert parsed.media[second["video"]["media"]]["video"].shape == (2, 4, 4, 3)
    assert second["fps"] == 12
    assert parsed.media[parsed.request.params["image"]["media"]]["image"].shape == (4, 6, 3)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": 5}, "prompt", "Expected `str"),
        ({"priority": "high"}, "priority", "Expected `int"),
        ({"modalities": "text"}, "modalities", "Expected `array"),
        ({"image": "missing.png"}, "image", "cannot read missing.png"),
        ({"image": "http://example.com/p.png"}, "image", "remote media are not fetched"),
        ({"image": "a.wav"}, "image", "not a readable"),
        ({"references": ["p.png"]}, "references", "mapping"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "path"),
    ],
)
def test_bad_line_names_its_field(folder: Path, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        line(folder, **fields)
    assert caught.value.info.param == param


def test_pickled_array_is_refused(folder: Path) -> None:
    np.save(folder / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(RequestError, match=r"cannot read evil\.npy"):
        line(folder, prompt="p", image="evil.npy")


def test_images_become_media_whether_bare_or_named(folder: Path) -> None:
    parsed = line(folder, prompt="p", images=["p.png", {"image": "p.png"}, {"media": "given"}])
    first, second, third = parsed.request.params["images"]
    assert third == {"media": "given"}
    assert [parsed.media[item["media"]]["image"].shape for item in (first, second)] == [(4, 6, 3)] * 2


def test_latents_are_read_from_npy_files_only(folder: Path) -> None:
    np.save(folder / "start.npy", np.ones((1, 2, 3), np.float32))
    parsed = line(folder, prompt="p", latents="start.npy", action_latents="start.npy")
    for name in ("latents", "action_latents"):
        assert parsed.media[parsed.request.params[name]["media"]]["latents"].shape == (1, 2, 3)
    for bad in ("p.png", "data:image/png;base64,AAAA"):
        with pytest.raises(RequestError, match="sound_latents"):
            line(folder, prompt="p", sound_latents=bad)
