"""G.711 against FFmpeg's codecs."""

from __future__ import annotations

import av
import numpy as np
import pytest

from omnistage.media.g711 import G711_RATE, Law, g711_decode, g711_encode

ALL_CODES = bytes(range(256))


def reference_decode(law: Law) -> np.ndarray:
    codec = av.CodecContext.create("pcm_mulaw" if law == "mu" else "pcm_alaw", "r")
    codec.sample_rate, codec.layout = G711_RATE, "mono"
    frames = codec.decode(av.Packet(ALL_CODES))
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames]).astype(np.int32)


@pytest.mark.parametrize("law", ["mu", "a"])
def test_every_code_has_the_level_that_ffmpeg_gives_it(law: Law) -> None:
    ours = np.rint(g711_decode(law, ALL_CODES)[0] * 32768).astype(np.int32)
    assert (ours == reference_decode(law)).all()


@pytest.mark.parametrize("law", ["mu", "a"])
def test_levels_survive_a_round_trip_and_others_go_to_the_nearest(law: Law) -> None:
    levels = g711_decode(law, ALL_CODES)
    assert (g711_decode(law, g711_encode(law, levels)) == levels).all()
    anything = np.random.default_rng(1).uniform(-1, 1, (1, 4000)).astype(np.float32)
    error = np.abs(g711_decode(law, g711_encode(law, anything)) - anything)[0]
    best = np.abs(anything[0][:, None] - levels[0][None]).min(axis=1)
    assert np.allclose(error, best, atol=1e-7)


def test_loud_and_broken_samples_are_clipped_and_silent() -> None:
    samples = np.array([[np.nan, 9.0, -9.0]], np.float32)
    decoded = g711_decode("mu", g711_encode("mu", samples))[0]
    assert decoded[0] == 0
    assert decoded[1] > 0.95
    assert decoded[2] < -0.95
