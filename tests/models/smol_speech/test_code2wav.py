"""The stage code2wav: chunk sizes, ends, rates, errors over a decoder that gives two samples per frame."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import soxr

from omnistage.models.smol_speech.code2wav import SAMPLE_RATE, Code2Wav, WaveState
from omnistage.models.smol_speech.decoding import Decoded, Part, Stream
from omnistage.payload import MultimodalPayload
from omnistage.stages.base import InputChunk, StageRequest
from omnistage.stages.generation.model import Produced

Array = np.ndarray[Any, np.dtype[np.float32]]


class Doubling:
    """Frame t (one channel) gives its value twice, once `lookahead` more frames are known or the stream ends."""

    def __init__(self, sample_rate: int = SAMPLE_RATE, lookahead: int = 2) -> None:
        self.sample_rate = sample_rate
        self.lookahead = lookahead
        self.fail = False
        self.batches: list[list[int]] = []

    def begin(self, tensors: dict[str, Array], seed: int, segment: int) -> Stream:
        return Stream(rows=tensors["z"].T.copy(), seed=seed, segment=segment)

    def decode(self, parts: list[Part]) -> list[Decoded]:
        if self.fail:
            raise RuntimeError("decoder broke")
        self.batches.append([part.count for part in parts])
        return [self._decode(part) for part in parts]

    def _decode(self, part: Part) -> Decoded:
        stream = part.stream
        known = stream.taken + part.count
        last = known if part.ends else max(stream.given, known - self.lookahead)
        samples = np.repeat(stream.rows[stream.given : last, 0], 2)
        return Decoded(part=part, samples=samples, given=last - stream.given, carry={})


def open_state(model: Code2Wav, voice: str = "heart") -> WaveState:
    return model.open(StageRequest(request_id="r", params={"voice": voice}))


def feed(model: Code2Wav, state: WaveState, frames: int | None, *, final: bool, segment: int = 0) -> None:
    payload = MultimodalPayload()
    if frames is not None:
        z = (np.arange(frames, dtype=np.float32) / 1000 + segment)[None]
        payload = MultimodalPayload.of({"segment": segment}, z=z)
    model.feed(state, InputChunk(request_id="r", port="frames", seq=0, final=final, payload=payload))


def drain(model: Code2Wav, state: WaveState) -> list[Produced]:
    produced: list[Produced] = []
    while model.pending(state):
        produced += model.run([state])[0]
    return produced


def samples(produced: list[Produced]) -> Array:
    return np.concatenate([item.payload["audio"][0] for item in produced])


def test_the_first_packet_is_small_and_the_others_are_larger() -> None:
    model = Code2Wav({"heart": Doubling()}, first_frames=3, chunk_frames=5)
    state = open_state(model)
    feed(model, state, 20, final=True)
    produced = drain(model, state)
    assert [item.payload["audio"].shape for item in produced] == [(1, 6), (1, 10), (1, 10), (1, 14)]
    assert [item.final for item in produced] == [False, False, False, True]
    assert {item.payload.meta["sample_rate"] for item in produced} == {SAMPLE_RATE}


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_chunk_sizes_do_not_change_the_samples(size: int) -> None:
    model = Code2Wav({"heart": Doubling()}, first_frames=size, chunk_frames=size)
    state = open_state(model)
    for segment in range(3):
        feed(model, state, 11 + segment, final=segment == 2, segment=segment)
    expected = np.concatenate([np.repeat(np.arange(11 + s, dtype=np.float32) / 1000 + s, 2) for s in range(3)])
    np.testing.assert_array_equal(samples(drain(model, state)), expected)
    assert (state.frames_in, state.frames_out) == (36, 36)


def test_the_end_comes_even_when_all_audio_is_out_already() -> None:
    model = Code2Wav({"heart": Doubling()}, 4, 4)
    state = open_state(model)
    feed(model, state, 4, final=False)
    assert not drain(model, state)[-1].final
    assert not model.done(state)
    feed(model, state, None, final=True)
    produced = drain(model, state)
    assert [(item.final, item.payload["audio"].shape) for item in produced] == [(True, (1, 0))]
    assert model.done(state)


def test_no_frames_at_all_is_empty_audio() -> None:
    model = Code2Wav({"heart": Doubling()}, 4, 4)
    state = open_state(model)
    feed(model, state, None, final=True)
    produced = drain(model, state)
    assert [(item.final, item.payload["audio"].shape) for item in produced] == [(True, (1, 0))]


def test_another_rate_is_resampled_without_seams() -> None:
    model = Code2Wav({"joe": Doubling(sample_rate=22050)}, 7, 13)
    state = open_state(model, "joe")
    feed(model, state, 1500, final=False)
    feed(model, state, 500, final=True, segment=1)
    source = np.concatenate(
        [np.repeat(np.arange(n, dtype=np.float32) / 1000 + s, 2) for s, n in enumerate((1500, 500))]
    )
    expected = soxr.resample(source, 22050, SAMPLE_RATE)
    got = samples(drain(model, state))
    assert len(got) == len(expected)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_voices_share_a_step_but_not_a_decoder() -> None:
    heart, joe = Doubling(), Doubling()
    model = Code2Wav({"heart": heart, "joe": joe}, 4, 4)
    states = [open_state(model, voice) for voice in ("heart", "joe", "heart")]
    for state in states:
        feed(model, state, 10, final=True)
    model.run(states)
    assert (heart.batches, joe.batches) == ([[6, 6]], [[6]])


def test_a_failing_decoder_leaves_every_request_as_it_was() -> None:
    heart, joe = Doubling(), Doubling()
    model = Code2Wav({"heart": heart, "joe": joe}, 4, 4)
    states = [open_state(model, voice) for voice in ("heart", "joe")]
    for state in states:
        feed(model, state, 10, final=True)
    joe.fail = True
    with pytest.raises(RuntimeError, match="decoder broke"):
        model.run(states)
    assert [state.streams[0].taken for state in states] == [0, 0]
    joe.fail = False
    assert len(samples(drain(model, states[0]))) == 20


def test_payloads_are_released_when_they_are_read() -> None:
    released: list[int] = []
    model = Code2Wav({"heart": Doubling()}, 4, 4)
    payload = MultimodalPayload(on_release=lambda: released.append(1))
    model.feed(open_state(model), InputChunk(request_id="r", port="frames", seq=0, final=True, payload=payload))
    assert released == [1]
