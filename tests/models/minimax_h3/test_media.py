"""Media preparation: sizes of the published rules, frames held at 24 fps, band-limited resampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import align_num_frames, resolve_canvas_size

from omnistage.models.minimax_h3 import geometry, media
from tests.models.minimax_h3 import tiny


@pytest.mark.parametrize(("width", "height"), [(16, 9), (9, 16), (1, 4), (4, 1), (1, 1), (1921, 1083), (640, 481)])
@pytest.mark.parametrize(("short", "pixels"), [(768, 768 * 1344), (32, 2048)])
def test_canvas_equals_the_reference(width: int, height: int, short: int, pixels: int) -> None:
    ours = geometry.canvas(width, height, multiple=32, short_edge=short, max_pixels=pixels)
    assert ours == resolve_canvas_size(width, height, 32, short, pixels)


def test_canvas_refuses_ratios_beyond_four() -> None:
    with pytest.raises(ValueError, match="not within"):
        geometry.canvas(41, 10, multiple=32, short_edge=768, max_pixels=1 << 20)


def test_frames_are_rounded_up_for_the_target_and_down_for_a_reference() -> None:
    for frames in range(1, 400):
        assert geometry.aligned_frames(frames, 17, 5) == align_num_frames(frames, 17, 5)
    assert [geometry.encodable_frames(n, 17, 5) for n in (13, 22, 38, 39, 124)] == [22, 22, 22, 39, 124]
    assert (geometry.latent_frames(124, 17, 5), geometry.latent_frames(345, 17, 5)) == (37, 102)
    assert geometry.audio_latents(124) == 207


def test_follower_keeps_its_ratio_and_loses_its_edges() -> None:
    picture = np.zeros((40, 100, 3), np.uint8)
    picture[:, 40:60] = 255
    cut = media.covered(picture, 32, 32)
    assert cut.shape == (32, 32, 3)
    assert cut[:, 10:22].min() > 240
    assert cut[:, :4].max() < 15


def test_clip_at_another_rate_holds_each_frame_until_the_next_one() -> None:
    clip = np.arange(6, dtype=np.uint8).reshape(6, 1, 1, 1).repeat(3, axis=3)
    assert media.at_model_rate(clip, 12.0)[:, 0, 0, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert media.at_model_rate(clip, 48.0)[:, 0, 0, 0].tolist() == [0, 2, 4]
    assert len(media.at_model_rate(clip, 29.97)) == round(6 * 24 / 29.97)


def test_mono_becomes_stereo_and_is_cut_to_the_video() -> None:
    mono = tiny.sound(1, 10.0, 1)
    stereo = media.reference_sound(mono, tiny.RATE, tiny.RATE, 124)
    assert stereo.shape == (2, int(124 / 24 * tiny.RATE))
    assert np.array_equal(stereo[0], stereo[1])


@pytest.mark.parametrize(("rate", "target"), [(8000, 32000), (44100, 32000), (48000, 32000)])
def test_resampled_tone_keeps_its_pitch_and_level_and_nothing_above_the_band_survives(rate: int, target: int) -> None:
    seconds = np.arange(rate) / rate
    low = np.sin(2 * math.pi * 440 * seconds).astype(np.float32)[None]
    got = media.resampled(low, rate, target)
    assert got.shape == (1, target)
    right = np.sin(2 * math.pi * 440 * np.arange(target) / target)
    inner = slice(target // 10, -target // 10)
    assert np.abs(got[0, inner] - right[inner]).max() < 0.01
    if rate > target:
        high = np.sin(2 * math.pi * 20000 * seconds).astype(np.float32)[None]
        assert np.abs(media.resampled(high, rate, target)[0, inner]).max() < 0.04
