# ruff: noqa: RUF001 (the look-alike characters of other scripts are meant)
"""The voice "joe": cut and converted decoder against the published graph, streaming, seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.utils import extract_model

from omnistage.models.smol_speech.artefacts import JOE_MODEL
from omnistage.models.smol_speech.code2wav import Code2Wav
from omnistage.models.smol_speech.convert_names import LATENT
from omnistage.models.smol_speech.decoding import Part
from omnistage.models.smol_speech.fronts import JoeFront, Utterance
from omnistage.models.smol_speech.joe_decoder import JoeDecoder
from omnistage.models.smol_speech.talker import Talker
from omnistage.weights import default_cache_dir, fetch

pytestmark = pytest.mark.slow

PHONEMES = "plˈiz ˈOpᵊn ðə wˈɪndO."
Array = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def decoder(real_code2wav: Code2Wav) -> JoeDecoder:
    found = real_code2wav._decoders["joe"]
    assert isinstance(found, JoeDecoder)
    return found


@pytest.fixture(scope="module")
def front(real_talker: Talker) -> JoeFront:
    found = real_talker._fronts["joe"]
    assert isinstance(found, JoeFront)
    return found


@pytest.fixture(scope="module")
def frames(front: JoeFront) -> dict[str, Array]:
    return front.frames(Utterance(phonemes=PHONEMES, seed=7))


def decode(decoder: JoeDecoder, tensors: dict[str, Array], size: int) -> Array:
    stream = decoder.begin(tensors, 7, 0)
    samples = []
    while stream.taken < len(stream.rows):
        decoded = decoder.decode([Part.next(stream, size)])[0]
        decoded.commit()
        samples.append(decoded.samples)
    return np.concatenate(samples)


def published_decoder(folder: Path) -> onnxruntime.InferenceSession:
    source = fetch([JOE_MODEL], default_cache_dir())[JOE_MODEL]
    model = onnx.load(str(source))
    del model.graph.value_info[:]
    model.graph.value_info.append(helper.make_tensor_value_info(LATENT, TensorProto.FLOAT, [1, 192, "frames"]))
    onnx.save(model, str(folder / "whole.onnx"))
    extract_model(
        str(folder / "whole.onnx"),
        str(folder / "decoder.onnx"),
        [LATENT],
        ["output"],
        check_model=False,
        infer_shapes=False,
    )
    return onnxruntime.InferenceSession(str(folder / "decoder.onnx"), providers=["CPUExecutionProvider"])


def test_the_decoder_equals_the_published_graph(decoder: JoeDecoder, frames: dict[str, Array], tmp_path: Path) -> None:
    expected = published_decoder(tmp_path).run(None, {LATENT: frames["z"][None]})[0].reshape(-1)
    got = decode(decoder, frames, frames["z"].shape[1])
    assert len(got) == 256 * frames["z"].shape[1]
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 7, 24, 100])
def test_streamed_audio_equals_the_whole(decoder: JoeDecoder, frames: dict[str, Array], size: int) -> None:
    whole = decode(decoder, frames, frames["z"].shape[1])
    np.testing.assert_allclose(decode(decoder, frames, size), whole, atol=1e-5)


def test_streams_at_different_positions_do_not_disturb_each_other(
    decoder: JoeDecoder, frames: dict[str, Array]
) -> None:
    tensors = [{"z": frames["z"][:, :n].copy()} for n in (90, 40, 11, 1)]
    expected = [decode(decoder, item, item["z"].shape[1]) for item in tensors]
    streams = [decoder.begin(item, 7, 0) for item in tensors]
    samples: list[list[Array]] = [[] for _ in streams]
    turn = 0
    while any(stream.taken < len(stream.rows) for stream in streams):
        live = [i for i, s in enumerate(streams) if s.taken < len(s.rows) and i <= turn]
        parts = [Part.next(streams[i], 4 + turn % 5) for i in live]
        for index, decoded in zip(live, decoder.decode(parts), strict=True):
            decoded.commit()
            samples[index].append(decoded.samples)
        turn += 1
    for got, want in zip(samples, expected, strict=True):
        np.testing.assert_allclose(np.concatenate(got), want, atol=1e-5)


def test_the_seed_decides_the_latent(front: JoeFront) -> None:
    def latent(seed: int) -> Array:
        return front.frames(Utterance(phonemes=PHONEMES, seed=seed))["z"]

    np.testing.assert_array_equal(latent(1), latent(1))
    assert latent(1).shape != latent(2).shape or not np.allclose(latent(1), latent(2))


def test_speed_changes_the_length(front: JoeFront) -> None:
    slow, fast = (front.frames(Utterance(phonemes=PHONEMES, speed=speed))["z"].shape[1] for speed in (0.5, 2.0))
    assert slow > 2.5 * fast
