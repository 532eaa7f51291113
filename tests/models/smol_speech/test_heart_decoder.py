"""The voice "heart": signal processing against the package's own, the decoder against its graph in fp32, streaming."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hibari import dsp
from onnx import helper, numpy_helper
from onnx.utils import extract_model

from omnistage.models.smol_speech import packed
from omnistage.models.smol_speech.artefacts import HEART, heart_source
from omnistage.models.smol_speech.code2wav import Code2Wav
from omnistage.models.smol_speech.convert_names import HEART_FRAMES
from omnistage.models.smol_speech.decoding import Part, Stream, frame_noise
from omnistage.models.smol_speech.fronts import Utterance
from omnistage.models.smol_speech.heart_decoder import BINS, HeartDecoder, framed_pulses, pulse_train, synthesise
from omnistage.models.smol_speech.phonemes import Phonemizer
from omnistage.models.smol_speech.talker import Talker

torch.set_num_threads(1)

TEXT = "A new study shows that walking for thirty minutes each day improves your health."
Array = np.ndarray[Any, np.dtype[np.float32]]


def pitch(frames: int) -> Array:
    random = np.random.default_rng(1)
    return np.where(random.random(frames) < 0.3, 0.0, random.uniform(80, 300, frames)).astype(np.float32)


class FixedNoise:
    """Stands for the package's random generator and gives it our noise."""

    def __init__(self, frames: int) -> None:
        self._frames = frames

    def standard_normal(self, shape: tuple[int, int], dtype: type) -> Array:
        noise = frame_noise(7, 0, 0, self._frames, 2 * BINS).reshape(self._frames, BINS, 2)
        return np.ascontiguousarray(noise.transpose(1, 0, 2)).reshape(shape)


@pytest.mark.parametrize("frames", [3, 50, 333])
def test_the_pulse_train_is_the_packages_own(frames: int) -> None:
    np.testing.assert_allclose(pulse_train(pitch(frames)), dsp.pulses(pitch(frames)), atol=1e-3)


def test_frames_of_the_spectrum_become_the_packages_waveform() -> None:
    frames = 40
    parts = [np.random.default_rng(i).normal(-2, 1, (frames, BINS)).astype(np.float32) for i in range(5)]
    f0 = pitch(frames)
    expected = dsp.synth(*(part.T.copy() for part in parts), f0, FixedNoise(frames))
    spectrum = torch.from_numpy(np.concatenate(parts, axis=1))
    noise = torch.from_numpy(frame_noise(7, 0, 0, frames, 2 * BINS))
    windowed = synthesise(spectrum, torch.from_numpy(framed_pulses(f0).copy()), noise).numpy()
    padded = np.zeros(frames * 300 + 900, np.float32)
    for index, frame in enumerate(windowed):
        padded[index * 300 : index * 300 + 1200] += frame
    inner = slice(900, frames * 300)
    np.testing.assert_allclose(padded[inner] / 1.5, expected[300 : frames * 300 - 600], atol=2e-5)


@pytest.mark.parametrize(("first", "count"), [(0, 1), (3, 20), (7, 2), (8, 8), (15, 1)])
def test_noise_of_a_frame_does_not_depend_on_the_chunk(first: int, count: int) -> None:
    whole = frame_noise(5, 2, 0, 64, 10)
    np.testing.assert_array_equal(frame_noise(5, 2, first, count, 10), whole[first : first + count])


def test_noise_differs_by_seed_segment_and_frame() -> None:
    rows = [frame_noise(seed, segment, 0, 9, 4) for seed, segment in ((1, 0), (2, 0), (1, 1), (-1, 0))]
    values = np.concatenate(rows)
    assert len(np.unique(values)) == values.size
    assert abs(float(frame_noise(1, 0, 0, 4000, 8).std()) - 1.0) < 0.02


@pytest.fixture(scope="module")
def decoder(real_code2wav: Code2Wav) -> HeartDecoder:
    found = real_code2wav._decoders["heart"]
    assert isinstance(found, HeartDecoder)
    return found


@pytest.fixture(scope="module")
def frames(real_talker: Talker) -> dict[str, Array]:
    phonemes = Phonemizer()(TEXT)[0]
    return real_talker._fronts["heart"].frames(Utterance(phonemes=phonemes, seed=7))


def decode(decoder: HeartDecoder, tensors: dict[str, Array], size: int, seed: int = 7) -> Array:
    stream = decoder.begin(tensors, seed, 0)
    samples = []
    while stream.taken < len(stream.rows):
        samples.append(step(decoder, [stream], size)[0])
    assert stream.given == len(stream.rows)
    return np.concatenate(samples)


def step(decoder: HeartDecoder, streams: list[Stream], size: int) -> list[Array]:
    decoded = decoder.decode([Part.next(stream, size) for stream in streams])
    for item in decoded:
        item.commit()
    return [item.samples for item in decoded]


def dequantised(path: Path) -> onnx.ModelProto:
    """The published decoder with MatMul on dequantised weights in place of dynamic quantisation."""
    extract_model(str(heart_source()), str(path), [HEART_FRAMES], ["lh", "theta", "ln", "lr", "phi"], check_model=False)
    model = onnx.load(str(path))
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    made_by = {output: node for node in graph.node for output in node.output}
    read_by = {name: node for node in graph.node for name in node.input}
    for node in [node for node in graph.node if node.op_type == "MatMulInteger"]:
        product = read_by[read_by[node.output[0]].output[0]]
        scale = weights[node.input[1].replace("_quantized", "_scale")]
        values = numpy_helper.to_array(weights[node.input[1]]).astype(np.float32)
        values = (values - numpy_helper.to_array(weights[node.input[3]]).astype(np.float32)) * numpy_helper.to_array(
            scale
        )
        graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), f"{node.name}.w"))
        source = made_by[node.input[0]].input[0]
        position = list(graph.node).index(product)
        graph.node.insert(position, helper.make_node("MatMul", [source, f"{node.name}.w"], [product.output[0]]))
        for obsolete in (product, read_by[node.output[0]], node):
            graph.node.remove(obsolete)
    return model


@pytest.mark.slow
def test_the_decoder_equals_the_graph_with_fp32_weights(
    decoder: HeartDecoder, frames: dict[str, Array], tmp_path: Path
) -> None:
    model = dequantised(tmp_path / "decoder.onnx")
    assert Counter(node.op_type for node in model.graph.node)["MatMulInteger"] == 0
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {HEART_FRAMES: frames["z"][None]})
    stream = decoder.begin(frames, 7, 0)
    with torch.inference_mode():
        rows = packed.Packed.of([torch.from_numpy(stream.rows)])
        spectrum = decoder._net(rows, [packed.Flow({}, ends=True)]).rows.numpy()
    for index, part in enumerate(expected):
        np.testing.assert_allclose(spectrum[:, index * BINS : (index + 1) * BINS], part[0].T, atol=1e-4)


@pytest.mark.slow
def test_the_front_end_gives_the_packages_own_pitch(frames: dict[str, Array]) -> None:
    session = onnxruntime.InferenceSession(str(heart_source()), providers=["CPUExecutionProvider"])
    import hibari

    voice = hibari.Hibari()
    ids = np.array([voice.ids(Phonemizer()(TEXT)[0])], np.int64)
    f0 = session.run(["f0"], {"ids": ids, "speed": np.ones(1, np.float32)})[0][0]
    np.testing.assert_allclose(frames["f0"], f0, atol=1e-3)


@pytest.mark.slow
def test_the_whole_decode_is_the_packages_waveform_of_the_same_spectrum(
    decoder: HeartDecoder, frames: dict[str, Array]
) -> None:
    stream = decoder.begin(frames, 7, 0)
    with torch.inference_mode():
        rows = packed.Packed.of([torch.from_numpy(stream.rows)])
        spectrum = decoder._net(rows, [packed.Flow({}, ends=True)]).rows.numpy()
    parts = [spectrum[:, index * BINS : (index + 1) * BINS].T.copy() for index in range(5)]
    expected = dsp.synth(*parts, frames["f0"], FixedNoise(len(stream.rows)))
    np.testing.assert_allclose(decode(decoder, frames, len(stream.rows)), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 7, 24, 100])
def test_streamed_audio_equals_the_whole(decoder: HeartDecoder, frames: dict[str, Array], size: int) -> None:
    whole = decode(decoder, frames, frames["z"].shape[1])
    np.testing.assert_allclose(decode(decoder, frames, size), whole, atol=1e-5)


@pytest.mark.slow
def test_every_layer_computes_each_frame_once(
    decoder: HeartDecoder, frames: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: Counter[int] = Counter()
    pick = packed._pick

    def counted(values: torch.Tensor, starts: list[int], lengths: list[int]) -> packed.Packed:
        rows[values.shape[1]] += sum(lengths)
        return pick(values, starts, lengths)

    monkeypatch.setattr(packed, "_pick", counted)
    decode(decoder, frames, 24)
    total = frames["z"].shape[1]
    # One layer reads 130 channels; nine give 256 (output), eight of which also read 256 (aligned input).
    assert rows == {130: total, 256: 17 * total}


@pytest.mark.slow
def test_streams_at_different_positions_do_not_disturb_each_other(
    decoder: HeartDecoder, frames: dict[str, Array]
) -> None:
    lengths = [400, 90, 33, 1, 2]
    tensors = [{"z": frames["z"][:, :n].copy(), "f0": frames["f0"][:n].copy()} for n in lengths]
    expected = [decode(decoder, item, item["z"].shape[1], seed=index) for index, item in enumerate(tensors)]
    streams = [decoder.begin(item, index, 0) for index, item in enumerate(tensors)]
    samples: list[list[Array]] = [[] for _ in streams]
    turn = 0
    while any(stream.taken < len(stream.rows) for stream in streams):
        live = [i for i, s in enumerate(streams) if s.taken < len(s.rows) and i <= turn]
        for index, piece in zip(live, step(decoder, [streams[i] for i in live], 5 + turn % 9), strict=True):
            samples[index].append(piece)
        turn += 1
    for got, want in zip(samples, expected, strict=True):
        np.testing.assert_allclose(np.concatenate(got), want, atol=1e-5)


@pytest.mark.slow
def test_the_converted_weights_are_complete() -> None:
    folder = HEART.locate("")
    assert {path.name for path in folder.iterdir()} == {"front.onnx", "decoder.safetensors", "decoder.json"}
