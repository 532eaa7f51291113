from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from omnistage.models.qwen3_omni.encoders import Encoded, EncoderCache, Encoders, Medium, content_key, window_tokens
from tests.models.qwen3_omni.stages import Models

pytestmark = pytest.mark.slow

N_WINDOW = 50


def sound(frames: int, padding: int | None = None) -> Medium:
    mel = torch.randn(128, frames, generator=torch.Generator().manual_seed(frames))
    places = torch.arange(window_tokens(frames, N_WINDOW))
    width = padding or min(frames, 2 * N_WINDOW)
    return Medium("audio", places, mel, content_key("audio", mel, width), padding=width)


def picture(height: int, width: int, seed: int = 0) -> Medium:
    pixels = torch.randn(height * width, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(seed))
    return Medium(
        "image", torch.arange(height * width // 4), pixels, content_key("image", pixels), grid=(1, height, width)
    )


def encoders(models: Models, limit: int = 1 << 20) -> Encoders:
    made = models.thinker.encoders
    return Encoders(made._audio, made._visual, limit)


def rows_of(medium: Medium) -> Tensor:
    assert medium.encoded is not None
    return torch.cat([medium.encoded.rows, *medium.encoded.deep])


def fresh(medium: Medium) -> Medium:
    return dataclasses.replace(medium, encoded=None)


def test_media_do_not_depend_on_their_batch_mates(models: Models) -> None:
    media = [sound(130), picture(4, 6), sound(30), sound(30, padding=100), sound(420), picture(2, 4, seed=1)]
    with torch.no_grad():
        encoders(models).encode(media)
        for medium in media:
            alone = fresh(medium)
            encoders(models).encode([alone])
            torch.testing.assert_close(rows_of(alone), rows_of(medium), rtol=0, atol=1e-5)
            assert len(medium.encoded.rows if medium.encoded else ()) == len(medium.positions)


def test_a_short_sound_is_encoded_as_its_own_request_would(models: Models) -> None:
    """The convolutions of a short window see their padding, so its width is part of the content."""
    wide, narrow = sound(30, padding=100), sound(30)
    with torch.no_grad():
        encoders(models).encode([wide, narrow])
    assert wide.key != narrow.key
    assert float((rows_of(wide) - rows_of(narrow)).abs().max()) > 1e-4


def test_equal_content_is_encoded_once(models: Models) -> None:
    made = encoders(models)
    first, twin, later = picture(4, 6), picture(4, 6), picture(4, 6)
    with torch.no_grad():
        made.encode([first, twin])
        made.encode([later])
    assert first.encoded is twin.encoded is later.encoded
    assert (made.cache.hits, made.cache.misses) == (1, 2)


def test_media_beyond_the_cache_are_encoded_all_the_same(models: Models) -> None:
    made = encoders(models, limit=0)
    media = [picture(4, 6), sound(130)]
    with torch.no_grad():
        made.encode(media)
    assert all(medium.encoded is not None for medium in media)
    assert made.cache.nbytes == 0


def test_the_cache_drops_what_was_used_least_recently() -> None:
    def encoded() -> Encoded:
        return Encoded(torch.zeros(25, dtype=torch.float32))

    cache = EncoderCache(limit=250)
    for key in (b"a", b"b"):
        cache.keep(key, encoded())
    assert cache.find(b"a") is not None
    cache.keep(b"c", encoded())
    assert [cache.find(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]
    assert cache.nbytes == 200
